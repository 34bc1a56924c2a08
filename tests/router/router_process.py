"""A real router process in front of engines, and the calls that tests make to it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from forked import ForkedProcess, run_microserve


class RouterProcess(ForkedProcess):
    """`microserve router`, ready to be called.

    With a built-in strategy it starts as `up` starts it, which has made the dry run before.
    """

    def __init__(self, engines: list[str], strategy: str | Path, *flags: str) -> None:
        flags = ("--strategy", str(strategy), "--port", "0", *flags)
        if not str(strategy).endswith(".py"):
            flags = ("--parent-pid", str(os.getpid()), *flags)
        urls = [part for url in engines for part in ("--engine", url)]
        super().__init__(run_microserve, "router", *urls, *flags)
        self.url = self.line().split()[-1]
        self.http = httpx.Client(base_url=self.url, timeout=30, verify=False)

    def ask(self, prompt: list[int], max_tokens: int = 4, **fields: Any) -> httpx.Response:
        body = {
            "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **fields,
        }  # fmt: skip
        return self.http.post("/v1/completions", json=body)

    def tokens(self, prompt: list[int], max_tokens: int = 4) -> list[int]:
        reply = self.ask(prompt, max_tokens)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["token_ids"]

    def use(self, name: str, **params: Any) -> int:
        reply = self.http.put("/admin/strategy", json={"name": name, "params": params})
        assert reply.status_code == 200, reply.text
        return reply.json()["generation"]

    def strategies(self) -> dict[str, Any]:
        return self.http.get("/admin/strategies").json()

    def kill(self) -> None:
        self.http.close()
        super().kill()


def until(condition: Callable[[], Any], timeout: float = 20.0) -> Any:
    """Poll until `condition` holds: other processes send no event."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found

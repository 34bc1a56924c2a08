"""`microserve up --backend vllm`: two vLLM engines and a router, for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from vllm_engines import EAGER, PYTHON

START_S = 180


class Fleet:
    """Two vLLM engines of `tiny` and a router, by `up`."""

    def __init__(self, folder: Path) -> None:
        self.state_file = folder / "up.json"
        self.log = folder / "up.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(str(PYTHON), "-P", "-m", "router", "up", "tiny", "--backend", "vllm"),
                    *("--prefill", "1", "--decode", "1", "--port", "0", "--dtype", "float32"),
                    *("--pool-pages", "300", "--state-file", str(self.state_file), *EAGER),
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=folder,
            )
        give_up = time.monotonic() + START_S
        while not self.state_file.exists():
            if time.monotonic() > give_up or self.process.poll() is not None:
                raise AssertionError(self.log.read_text())
            time.sleep(0.1)
        self.http = httpx.Client(base_url=self.state["router"]["url"], timeout=120, verify=False)

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.state_file.read_text())
        return state

    def use(self, name: str, params: dict[str, Any]) -> None:
        reply = self.http.put("/admin/strategy", json={"name": name, "params": params})
        assert reply.status_code == 200, reply.text

    def complete(self, ids: list[int], **fields: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": ids, "temperature": 0, "max_tokens": 24,
                "ignore_eos": True, "return_token_ids": True, **fields}  # fmt: skip
        reply = self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return {**answer, "request": reply.headers["x-request-id"]}

    def stream(self, ids: list[int], **fields: Any) -> Iterator[list[int]]:
        """Yield the token ids of each chunk. Fails for an error."""
        body = {"model": "tiny", "prompt": ids, "temperature": 0, "stream": True,
                "ignore_eos": True, "return_token_ids": True, **fields}  # fmt: skip
        with self.http.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        yield choice.get("token_ids") or []

    def engines(self) -> dict[str, Any]:
        listed: list[dict[str, Any]] = self.http.get("/admin/engines").json()["engines"]
        return {engine["id"]: engine for engine in listed}

    def wait_up(self, within_s: float = START_S) -> None:
        give_up = time.monotonic() + within_s
        while [engine["status"] for engine in self.engines().values()] != ["up", "up"]:
            assert time.monotonic() < give_up, self.engines()
            time.sleep(0.2)

    def at_rest(self) -> None:
        give_up = time.monotonic() + 15
        while True:
            states = [engine["state"] for engine in self.engines().values()]
            rest = [
                not (state["running"] + state["waiting"] + state["puts_in_flight"])
                and state["pages"]["free"] + state["pages"]["cached"] == state["pages"]["total"]
                for state in states
            ]
            if all(rest):
                return
            assert time.monotonic() < give_up, states
            time.sleep(0.2)

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(timeout=30)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


@contextmanager
def running_fleet(folder: Path) -> Iterator[Fleet]:
    """Run a fleet until the end of the block."""
    fleet = Fleet(folder)
    try:
        yield fleet
    finally:
        fleet.stop()

"""A real engine process, and the calls that tests make to it."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from forked import ForkedProcess, run_engine

ROOT = Path(__file__).parents[1]


class EngineClient:
    """The calls to one engine, over `http`."""

    http: httpx.Client
    max_tokens = 4  # of a generation, unless the test says otherwise

    def post(self, call: str, **body: Any) -> httpx.Response:
        return self.http.post(f"/microserving/{call}", json=body)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.http.get("/microserving/state").json()
        return state

    def stream(self, prompt: list[int], **fields: Any) -> Iterator[dict[str, Any]]:
        """Yield the events of a generation as they arrive."""
        body = {
            "request_id": f"r{time.monotonic_ns()}",
            "prompt": prompt,
            "temperature": 0.0,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            **fields,
        }
        with self.http.stream("POST", "/microserving/start_generate", json=body) as reply:
            if reply.status_code != 200:
                raise RuntimeError(reply.read())
            yield from events(reply)

    def generate(self, prompt: list[int], **fields: Any) -> list[dict[str, Any]]:
        """Return the events of a generation."""
        return list(self.stream(prompt, **fields))

    def at_rest(self, within_s: float = 30.0) -> dict[str, Any]:
        """Wait until nothing runs and every page is free or cached; check the integrity."""
        give_up = time.monotonic() + within_s
        while True:
            state = self.state()
            pages = state["pages"]
            busy = state["running"] + state["waiting"] + state["puts_in_flight"]
            idle = not busy and not state["leases"]
            if idle and pages["free"] + pages["cached"] == pages["total"]:
                break
            if time.monotonic() > give_up:
                raise AssertionError(state)
            time.sleep(0.005)
        assert self.http.get("/microserving/integrity").json() == {"ok": True}
        return state


class EngineProcess(EngineClient, ForkedProcess):
    """An engine with the model `tiny`, ready to be called."""

    def __init__(
        self,
        *flags: str,
        secret: str = "secret",
        port: int = 0,
        model: str = "tiny",
        **environment: str,
    ) -> None:
        if model == "tiny" and "--pool-pages" not in flags:
            flags = ("--pool-pages", "2048", *flags)  # by default it takes a share of the machine
        super().__init__(
            run_engine,
            *(model, "--port", str(port), "--threads", "1", *flags),
            MICROSERVE_SECRET=secret,
            **environment,
        )
        self.url = self.line().split()[-1]
        # Plain HTTP needs no certificates, and reading them takes longer than a call.
        self.http = httpx.Client(base_url=self.url, timeout=20, verify=False)

    @property
    def port(self) -> int:
        return httpx.URL(self.url).port or 0

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal; return the exit code and the log."""
        self.signal(number)
        return self.wait(), self.log

    def kill(self) -> None:
        self.http.close()
        super().kill()


def events(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in reply.iter_lines():
        if line:
            yield json.loads(line.removeprefix("data: "))

"""A real engine process, and the calls that tests make to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]


class EngineProcess:
    """`python -m engine tiny`, ready to be called."""

    def __init__(self, *flags: str, secret: str = "secret") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine", "tiny", "--port", "0", "--threads", "1", *flags],
            cwd=ROOT,
            env={**os.environ, "MICROSERVE_SECRET": secret},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if "ready" not in line:
            raise RuntimeError(self.process.communicate()[1])
        self.url = line.split()[-1]
        self.http = httpx.Client(base_url=self.url, timeout=20)

    def post(self, call: str, **body: Any) -> httpx.Response:
        return self.http.post(f"/microserving/{call}", json=body)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.http.get("/microserving/state").json()
        return state

    def generate(self, prompt: list[int], **fields: Any) -> list[dict[str, Any]]:
        """The events of a generation."""
        body = {
            "request_id": f"r{time.monotonic_ns()}",
            "prompt": prompt,
            "temperature": 0.0,
            "max_tokens": 4,
            "ignore_eos": True,
            **fields,
        }
        with self.http.stream("POST", "/microserving/start_generate", json=body) as reply:
            if reply.status_code != 200:
                raise RuntimeError(reply.read())
            return list(events(reply))

    def at_rest(self) -> dict[str, Any]:
        """Wait until nothing runs and every page is free or cached; prove it."""
        give_up = time.monotonic() + 10
        while True:
            state = self.state()
            pages = state["pages"]
            busy = state["running"] + state["waiting"] + state["puts_in_flight"]
            if not busy and pages["free"] + pages["cached"] == pages["total"]:
                break
            if time.monotonic() > give_up:
                raise AssertionError(state)
            time.sleep(0.005)
        assert self.http.get("/microserving/integrity").json() == {"ok": True}
        return state

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Signal it; returns its exit code and what it logged."""
        self.process.send_signal(number)
        log = self.process.communicate(timeout=20)[1]
        return self.process.returncode, log

    def kill(self) -> None:
        self.http.close()
        self.process.kill()
        self.process.communicate()


def events(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in reply.iter_lines():
        if line:
            yield json.loads(line.removeprefix("data: "))

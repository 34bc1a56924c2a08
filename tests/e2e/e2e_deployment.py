"""Real deployments: `microserve up` as a user starts it; its state file gives the addresses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

START_S = 120.0  # includes the model's download


@dataclass
class Engine:
    """One engine process, and its microserving calls."""

    id: str
    url: str
    pid: int
    headers: dict[str, str]

    def call(self, name: str, **body: Any) -> dict[str, Any]:
        """Make a call that must succeed; return its reply."""
        url = f"{self.url}/microserving/{name}"
        reply = httpx.post(url, json=body, headers=self.headers, timeout=120)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def generate(self, prompt: list[int], *, greedy: int, **fields: Any) -> list[int]:
        """Return the token ids of one greedy `start_generate` that ignores EOS."""
        body = {"prompt": prompt, "max_tokens": greedy, "temperature": 0, "ignore_eos": True}
        tokens: list[int] = []
        with httpx.stream(
            "POST", f"{self.url}/microserving/start_generate", json=body | fields,
            headers=self.headers, timeout=120,
        ) as reply:  # fmt: skip
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                if line:
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    tokens += event.get("token_ids", [])
        return tokens

    def state(self) -> dict[str, Any]:
        return self._get("state")

    def check_at_rest(self) -> None:
        """Check that nothing runs, every page is free or cached, and integrity holds."""
        deadline = time.monotonic() + 20
        while True:
            state = self.state()
            pages = state["pages"]
            at_rest = (
                pages["free"] + pages["cached"] == pages["total"]
                and not state["running"] + state["waiting"] + state["puts_in_flight"]
                and not state["leases"]
            )
            if at_rest or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        assert at_rest, state
        assert self._get("integrity") == {"ok": True}

    def _get(self, name: str) -> dict[str, Any]:
        url = f"{self.url}/microserving/{name}"
        return httpx.get(url, headers=self.headers, timeout=30).json()


@dataclass
class Deployment:
    """A router and its engines."""

    url: str
    pid: int  # of the router
    engines: list[Engine]
    admin: dict[str, str]  # headers

    def use(self, strategy: str, **params: Any) -> int:
        """Switch the strategy; return its generation."""
        reply = httpx.put(
            f"{self.url}/admin/strategy",
            json={"name": strategy, "params": params},
            headers=self.admin,
            timeout=30,
        )
        assert reply.status_code == 200, reply.text
        return reply.json()["generation"]

    def complete(self, prompt: list[int], *, greedy: int, model: str) -> dict[str, Any]:
        """Return the answer to one greedy completion of token ids through the router."""
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": greedy,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        reply = httpx.post(f"{self.url}/v1/completions", json=body, timeout=300)
        assert reply.status_code == 200, reply.text
        return reply.json() | {"request_id": reply.headers["x-request-id"]}

    def members(self) -> list[dict[str, Any]]:
        """Return the engines as the router lists them."""
        reply = httpx.get(f"{self.url}/admin/engines", headers=self.admin, timeout=30)
        return reply.json()["engines"]

    def receipt(self, request_id: str) -> dict[str, Any]:
        return httpx.get(
            f"{self.url}/admin/requests/{request_id}", headers=self.admin, timeout=30
        ).json()


@dataclass
class UpDeployment(Deployment):
    """A deployment that `up` watches."""

    up: subprocess.Popen[bytes]


def launch(folder: Path, model: str, *flags: str) -> UpDeployment:
    """Start `microserve up` and wait until it is ready; its output goes to `folder/up.log`."""
    state_file = folder / "state.json"
    command = [sys.executable, "-m", "router", "up", model, "--port", "0"]
    with (folder / "up.log").open("wb") as log:
        up = subprocess.Popen(
            [*command, "--state-file", str(state_file), *flags],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    deadline = time.monotonic() + START_S
    while not state_file.exists():
        assert up.poll() is None, (folder / "up.log").read_text()
        assert time.monotonic() < deadline, (folder / "up.log").read_text()
        time.sleep(0.05)
    state = json.loads(state_file.read_text())
    key = {"Authorization": f"Bearer {state['engine_api_key']}"}
    return UpDeployment(
        url=state["router"]["url"],
        pid=state["router"]["pid"],
        up=up,
        engines=[Engine(e["id"], e["url"], e["pid"], key) for e in state["engines"]],
        admin={"Authorization": f"Bearer {state['admin_key']}"} if state["admin_key"] else {},
    )


@contextmanager
def deployed(folder: Path, model: str, *flags: str) -> Iterator[UpDeployment]:
    """Run `microserve up MODEL FLAGS…`. At the end every engine must be at rest."""
    deployment = launch(folder, model, *flags)
    try:
        yield deployment
        for engine in deployment.engines:
            engine.check_at_rest()
    finally:
        deployment.up.send_signal(signal.SIGTERM)
        deployment.up.wait(30)

"""Microserving calls to one engine, as a router makes them."""

from __future__ import annotations

import itertools
import json
import random
import time
from typing import Any

import httpx

__all__ = ["Engine", "send", "source", "tokens", "unused_id"]

ids = itertools.count()
source = random.Random(0)


class Engine:
    """Makes the microserving calls to one engine process."""

    def __init__(self, url: str, pid: int, key: str) -> None:
        self.pid = pid
        headers = {"Authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=600)

    def call(self, name: str, **body: Any) -> dict[str, Any]:
        reply = self._http.post(f"/microserving/{name}", json=body)
        if reply.status_code != 200:
            raise SystemExit(f"{name}: {reply.text}")
        answer: dict[str, Any] = reply.json()
        return answer

    def generate(self, prompt: list[int], count: int, **fields: Any) -> list[float]:
        """Return the arrival time of each token, in ms since the call."""
        body = {
            "request_id": unused_id(), "prompt": prompt, "max_tokens": count, "temperature": 0,
            "ignore_eos": True, **fields,
        }  # fmt: skip
        times: list[float] = []
        began = time.perf_counter()
        with self._http.stream("POST", "/microserving/start_generate", json=body) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise SystemExit(f"start_generate: {event}")
                    now = (time.perf_counter() - began) * 1e3
                    times += [now] * len(event.get("token_ids", ()))
        return times


def send(
    sender: Engine, receiver: Engine, request_id: str, prompt: list[int], end: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Call `prep_recv` and `remote_send` for what the receiver lacks. Return both replies."""
    lease = receiver.call("prep_recv", request_id=request_id, prompt=prompt, end=end)
    sent = sender.call(
        "remote_send",
        request_id=request_id,
        prompt=prompt,
        begin=lease["match_len"],
        end=end,
        kv_addr=lease["kv_addr"],
    )
    return lease, sent


def tokens(count: int) -> list[int]:
    """Return a prompt that is in no cache."""
    return [source.randrange(1000, 40000) for _ in range(count)]


def unused_id() -> str:
    return f"bench-{next(ids)}"

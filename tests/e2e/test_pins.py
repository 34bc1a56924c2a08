"""Pinned prefixes on real engines: they outlive evictions and the death of an engine."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_deployment import Deployment, Engine, deployed
from e2e_forked import forked

PAGE, PAGES, POOL = 16, 40, 256
pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(300)]
salts = itertools.count(1)


def prompt(length: int) -> list[int]:
    """Return a prompt that is in no cache."""
    salt = next(salts)
    return [(salt * 41 + 11 * i * i + 5 * i) % 500 + 1 for i in range(length)]


def cached(engine: Engine, tokens: list[int]) -> int:
    """Return how many tokens of a prompt the engine has cached, which computes the rest."""
    body = {
        "request_id": f"pins-{time.monotonic_ns()}", "prompt": tokens, "max_tokens": 1,
        "ignore_eos": True,
    }  # fmt: skip
    url = f"{engine.url}/microserving/start_generate"
    reply = httpx.post(url, json=body, headers=engine.headers, timeout=120)
    assert reply.status_code == 200, reply.text
    return json.loads(reply.text.split("\n\n")[0].removeprefix("data: "))["begin"]


def flood(engine: Engine) -> None:
    """Fill the pool with other prompts, which evicts all that can be evicted."""
    for _ in range(4):
        assert cached(engine, prompt(100 * PAGE)) == 0


def until(condition: Callable[[], Any]) -> Any:
    """Poll until `condition` holds: other processes send no event."""
    deadline = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def call(deployment: Deployment, name: str, **body: Any) -> dict[str, Any]:
    url = f"{deployment.url}/admin/{name}"
    reply = httpx.post(url, json=body, headers=deployment.admin, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def pins(deployment: Deployment) -> list[dict[str, Any]]:
    reply = httpx.get(f"{deployment.url}/admin/pins", headers=deployment.admin, timeout=60)
    return reply.json()["pins"]


def is_pinned(deployment: Deployment) -> bool:
    (pin,) = pins(deployment)
    return pin["state"] == "pinned" and pin["present"] == ["engine-0", "engine-1"]


def test_a_pinned_prefix_outlives_evictions_and_the_death_of_an_engine(tmp_path: Path) -> None:
    tokens = prompt(PAGES * PAGE + 7)
    flags = ("--engines", "2", "--pool-pages", str(POOL), "--strategy", "cache_aware")
    with deployed(tmp_path, "tiny", *flags) as deployment:
        told = call(deployment, "pin", prefix=tokens, copies=2)
        assert (told["tokens"], told["copies"]) == (PAGES * PAGE, 2)
        until(lambda: is_pinned(deployment))
        metrics = httpx.get(f"{deployment.url}/metrics", timeout=60).text
        made = 'microserve_router_pin_copies_made_total{how="%s"} 1.0'
        assert made % "computed" in metrics and made % "copied" in metrics
        assert "microserve_router_pin_copies 2.0" in metrics
        for engine in deployment.engines:
            flood(engine)
            assert engine.state()["pages"]["pinned"] == PAGES
            assert cached(engine, tokens) == PAGES * PAGE

        killed = deployment.engines[0]
        epoch = killed.state()["epoch"]
        os.kill(killed.pid, signal.SIGKILL)
        until(lambda: not is_pinned(deployment))
        until(lambda: is_pinned(deployment))
        assert killed.state()["epoch"] != epoch
        flood(killed)
        for engine in deployment.engines:
            engine.check_at_rest()
            assert cached(engine, tokens) == PAGES * PAGE
        assert deployment.complete([*tokens, 1, 2], greedy=4, model="tiny")["usage"][
            "prompt_tokens_details"
        ] == {"cached_tokens": PAGES * PAGE}

        call(deployment, "unpin", prefix=tokens, copies=1)
        until(
            lambda: sum(engine.state()["pages"]["pinned"] for engine in deployment.engines) == PAGES
        )
        call(deployment, "unpin", id=told["id"])
        until(lambda: not pins(deployment))
        for engine in deployment.engines:
            flood(engine)
            assert engine.state()["pages"]["pinned"] == 0
            assert cached(engine, tokens) == 0


def test_a_router_that_stops_leaves_no_pin() -> None:
    tokens = prompt(PAGES * PAGE)
    with forked("tiny", "--pool-pages", str(POOL), roles=["any"]) as deployment:
        call(deployment, "pin", prefix=tokens)
        (engine,) = deployment.engines
        until(lambda: pins(deployment)[0]["state"] == "pinned")
        assert engine.state()["pages"]["pinned"] == PAGES
        os.kill(deployment.pid, signal.SIGTERM)
        until(lambda: engine.state()["pages"]["pinned"] == 0)

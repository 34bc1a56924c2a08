"""Engine processes that lend to each other, and the calls that tests of long contexts make."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from engine_process import EngineProcess

__all__ = ["lent", "name_creditors", "prompt", "tokens", "wait_until"]


def name_creditors(debtor: EngineProcess, *creditors: EngineProcess, available: int) -> None:
    """Tell a debtor of its creditors as the router does."""
    states = [(engine.url, engine.state()) for engine in creditors]
    rows = [
        {
            "instance": state["engine_id"],
            "epoch": state["epoch"],
            "url": url,
            "available": available,
        }
        for url, state in states
    ]
    assert debtor.post("lend/creditors", creditors=rows).status_code == 200


def prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(3, 250) for _ in range(length)]


def tokens(events: list[dict[str, Any]]) -> list[int]:
    return [token for event in events for token in event.get("token_ids", [])]


def lent(engine: EngineProcess) -> int:
    return int(engine.state()["pages"]["lent"])


def wait_until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    give_up = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)

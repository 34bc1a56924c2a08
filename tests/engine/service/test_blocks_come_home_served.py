"""`lend/home` over engine processes: blocks come home in mid-decode, and no token changes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from debtor_processes import lent, name_creditors, prompt, tokens, wait_until
from engine_process import EngineProcess

pytestmark = pytest.mark.processes

POOL, BLOCK = 80, 8  # pages
LEASE = "--lease-ms", "2000"
DEBTOR = "--pool-pages", str(POOL), "--borrow", "--max-model-len", "4096", *LEASE
LENDER = "--pool-pages", "300", "--lend-share", "0.9", *LEASE


def home(engine: EngineProcess, cause: str) -> float:
    text = engine.http.get("/metrics").text
    (line,) = [
        line
        for line in text.splitlines()
        if line.startswith("microserve:home_blocks_total") and f'cause="{cause}"' in line
    ]
    return float(line.split()[-1])


def order(debtor: EngineProcess, creditor: dict[str, Any], swap: str, /, **fields: Any) -> Any:
    names = {"swap": swap, "creditor": creditor["engine_id"], "creditor_epoch": creditor["epoch"]}
    body = {"blocks": 2, "freeze_ms": 10_000, **names, **fields}
    return debtor.http.post("/microserving/lend/home", json=body)


@pytest.fixture
def pair() -> Iterator[tuple[EngineProcess, EngineProcess, dict[str, Any]]]:
    """A debtor that knows its one creditor, the creditor, and the creditor's state at first."""
    debtor, creditor = EngineProcess(*DEBTOR), EngineProcess(*LENDER, "--engine-id", "c")
    name_creditors(debtor, creditor, available=200)
    yield debtor, creditor, creditor.state()
    debtor.kill()
    creditor.kill()


@pytest.mark.slow
def test_an_order_brings_blocks_home_in_mid_decode(pair: Any):
    debtor, creditor, state = pair
    found: list[dict[str, Any]] = []
    replies: list[httpx.Response] = []

    def ask() -> None:
        replies.append(order(debtor, state, "swap"))

    asking: list[threading.Thread] = []
    for event in debtor.stream(prompt(1300), max_tokens=60):
        found.append(event)
        if not asking and len(tokens(found)) >= 5:
            before = lent(creditor)
            asking = [threading.Thread(target=ask) for _ in range(2)]  # one is a repetition
            for thread in asking:
                thread.start()
        if len(replies) == 2 and not home(debtor, "swap"):
            assert before - lent(creditor) >= 2 * BLOCK
            assert debtor.state()["heartbeat"]["borrowed"] == {"c": lent(creditor)}
    for thread in asking:
        thread.join(10)
    assert [reply.json() for reply in replies] == [{"blocks": 2}] * 2
    assert order(debtor, state, "swap").json() == {"blocks": 2}
    assert home(debtor, "swap") == 2
    assert order(debtor, state, "swap", blocks=3).json()["error"]["param"] == "swap"
    assert tokens(found) == tokens(creditor.generate(prompt(1300), max_tokens=60))
    assert order(debtor, state, "another").json() == {"blocks": 0}  # there is nothing left
    debtor.at_rest()
    wait_until(lambda: lent(creditor) == 0)
    creditor.at_rest()


@pytest.mark.thorough
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("at", [0.0, 0.002, 0.01])
def test_a_creditor_that_is_lost_while_blocks_come_home(
    pair: Any, death: signal.Signals, at: float
):
    """Landings are abandoned, what has not come home is computed again, and nothing leaks."""
    debtor, creditor, state = pair
    expected = tokens(creditor.generate(prompt(1300), max_tokens=40))
    found: list[dict[str, Any]] = []
    replies: list[Any] = []

    def ask() -> None:
        replies.append(order(debtor, state, "swap", blocks=5, freeze_ms=3000))

    asking = threading.Thread(target=ask)
    other = EngineProcess(*LENDER, "--engine-id", "other")
    try:
        for event in debtor.stream(prompt(1300), max_tokens=40):
            found.append(event)
            if not asking.ident and len(tokens(found)) >= 5:
                asking.start()
                time.sleep(at)
                creditor.signal(death)
                name_creditors(debtor, other, available=200)
        asking.join(10)
        assert replies and 0 <= replies[0].json()["blocks"] <= 5
        assert tokens(found) == expected
        if death == signal.SIGSTOP:
            creditor.signal(signal.SIGCONT)
        debtor.at_rest()
        wait_until(lambda: lent(other) == 0)
    finally:
        other.kill()


def test_bad_orders(pair: Any):
    debtor, creditor, state = pair
    for fields, param in (
        ({"blocks": 0}, "blocks"),
        ({"blocks": 1 << 17}, "blocks"),
        ({"freeze_ms": 0}, "freeze_ms"),
        ({"freeze_ms": 60_001}, "freeze_ms"),
        ({"creditor": ""}, "creditor"),
        ({"more": 1}, "more"),
    ):
        error = order(debtor, state, "s", **fields).json()["error"]
        assert (error["type"], error["param"]) == ("bad_request", param)
    stale = order(debtor, {**state, "epoch": 1}, "s").json()["error"]
    assert stale["type"] == "stale_epoch"
    assert order(debtor, state, "s").json() == {"blocks": 0}
    assert order(debtor, {"engine_id": "nobody", "epoch": 5}, "t").json() == {"blocks": 0}
    assert order(creditor, debtor.state(), "s").json()["error"]["type"] == "unsupported"
    debtor.at_rest()

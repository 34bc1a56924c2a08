"""Contexts over many engine processes: one that borrows, and creditors that lend, stop and die."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from debtor_processes import lent, name_creditors, prompt, tokens, wait_until
from engine_process import EngineProcess

pytestmark = [pytest.mark.slow, pytest.mark.processes]

POOL = 32  # pages of the debtor: 512 tokens
LEASE_S = 2.0


@pytest.fixture(scope="module")
def whole() -> Iterator[EngineProcess]:
    """One engine with room for everything."""
    engine = EngineProcess("--pool-pages", "1200")
    yield engine
    engine.kill()


@pytest.fixture
def fleet() -> Iterator[Callable[[int], tuple[EngineProcess, list[EngineProcess]]]]:
    """Start a debtor and its creditors, and tell it of them as the router does."""
    engines: list[EngineProcess] = []

    def start(creditors: int) -> tuple[EngineProcess, list[EngineProcess]]:
        lease = "--lease-ms", str(int(1000 * LEASE_S))
        engines.append(
            EngineProcess("--pool-pages", str(POOL), "--borrow", "--max-model-len", "4096", *lease)
        )
        for number in range(creditors):
            flags = "--pool-pages", "400", "--lend-share", "0.9", "--engine-id", f"c{number}"
            engines.append(EngineProcess(*flags, *lease))
        debtor, *others = engines
        name_creditors(debtor, *others, available=300)
        return debtor, others

    yield start
    for engine in engines:
        engine.kill()


def test_contexts_over_three_processes(fleet: Any, whole: EngineProcess):
    """IL12: twice the pool and six times, beside short requests; then everything is given back."""
    debtor, creditors = fleet(2)
    found: dict[int, list[int]] = {}

    def run(length: int, count: int) -> None:
        found[length] = tokens(debtor.generate(prompt(length), max_tokens=count))

    work = [(1000, 20), (3000, 12), (40, 30)]
    threads = [threading.Thread(target=run, args=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for length, count in work:
        assert found[length] == tokens(whole.generate(prompt(length), max_tokens=count))
        assert len(found[length]) == count
    debtor.at_rest()
    for creditor in creditors:
        wait_until(lambda creditor=creditor: lent(creditor) == 0)
        creditor.at_rest()


@pytest.mark.parametrize(
    "death", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.thorough)]
)
def test_a_creditor_that_is_lost_in_mid_decode(
    fleet: Any, whole: EngineProcess, death: signal.Signals
):
    """The generation goes on with the same tokens; nothing is repeated."""
    debtor, creditors = fleet(2)
    found: list[dict[str, Any]] = []
    wait_until(lambda: len(debtor.state()["borrowing"]["creditors"]) == 2)
    lost: EngineProcess | None = None
    for event in debtor.stream(prompt(1300), max_tokens=60):
        found.append(event)
        if lost is None and len(tokens(found)) >= 10:
            lost = max(creditors, key=lent)
            assert lent(lost)
            lost.signal(death)
    assert tokens(found) == tokens(whole.generate(prompt(1300), max_tokens=60))
    assert found[-1]["finish_reason"] == "length"
    debtor.at_rest()
    assert lost is not None
    if death == signal.SIGSTOP:
        lost.signal(signal.SIGCONT)
    for creditor in creditors:
        if creditor is not lost or death == signal.SIGSTOP:
            wait_until(lambda creditor=creditor: lent(creditor) == 0)


@pytest.mark.thorough
def test_a_client_that_goes_away(fleet: Any):
    debtor, creditors = fleet(1)
    for event in debtor.stream(prompt(1300), max_tokens=200):
        if tokens([event]):
            assert lent(creditors[0])
            break
    debtor.at_rest()
    wait_until(lambda: lent(creditors[0]) == 0)


@pytest.mark.thorough
def test_a_creditor_wants_its_pages_back(fleet: Any, whole: EngineProcess):
    """Its own request comes first; the debtor's blocks are computed again elsewhere."""
    debtor, creditors = fleet(2)
    found: list[dict[str, Any]] = []
    own: threading.Thread | None = None
    for event in debtor.stream(prompt(1300), max_tokens=40):
        found.append(event)
        if own is None and tokens(found):
            call = partial(max(creditors, key=lent).generate, prompt(390 * 16), max_tokens=4)
            own = threading.Thread(target=call, daemon=True)
            own.start()
    assert tokens(found) == tokens(whole.generate(prompt(1300), max_tokens=40))
    assert own is not None
    own.join(20)
    assert not own.is_alive()
    debtor.at_rest()


@pytest.mark.parametrize(
    "death", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.thorough)]
)
def test_a_debtor_that_is_lost_in_mid_decode(
    fleet: Any, whole: EngineProcess, death: signal.Signals
):
    """Its creditor has the pages back; the creditor's own request is undisturbed."""
    debtor, (creditor,) = fleet(1)
    stream = debtor.stream(prompt(1300), max_tokens=200)
    found = [next(stream) for _ in range(5)]
    assert lent(creditor)
    own = creditor.stream(prompt(300), max_tokens=60)
    first = next(own)
    debtor.signal(death)
    assert tokens([first, *own]) == tokens(whole.generate(prompt(300), max_tokens=60))
    wait_until(lambda: lent(creditor) == 0)
    creditor.at_rest()
    if death == signal.SIGSTOP:
        debtor.signal(signal.SIGCONT)  # its loans are over: it borrows and computes again
        found.extend(stream)
        assert tokens(found) == tokens(whole.generate(prompt(1300), max_tokens=200))
        debtor.at_rest()
        wait_until(lambda: lent(creditor) == 0)

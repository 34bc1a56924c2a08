"""Engines in a ring of debts, whose long generations bring their blocks home in mid-decode."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_process import EngineProcess
from router_process import RouterProcess, until

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.processes]

NAMES = ["a", "b", "c"]
POOL, LENT = 96, 32  # pages of each, and how many it lends: four blocks
BLOCK = 8  # pages
PROMPT = 1700  # tokens: more than a pool
WITHIN_S = 120.0


class Generations:
    """A long generation on each engine, read by a thread of its own until `stop`."""

    def __init__(self, max_tokens: int) -> None:
        self.tokens: list[list[int]] = []
        self.stop = threading.Event()
        self._max_tokens = max_tokens
        self._threads: list[threading.Thread] = []

    def start(self, engine: EngineProcess) -> None:
        """Start one, and wait until it decodes."""
        number = len(self.tokens)
        self.tokens.append([])
        self._threads.append(threading.Thread(target=self._read, args=(number, engine)))
        self._threads[-1].start()
        until(lambda: self.tokens[number], WITHIN_S)

    def _read(self, number: int, engine: EngineProcess) -> None:
        for event in engine.stream(prompt(number), max_tokens=self._max_tokens):
            self.tokens[number] += event.get("token_ids", [])
            if self.stop.is_set():
                return

    def end(self) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join()


def prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(3, 250) for _ in range(PROMPT)]


def row(engine: EngineProcess, url: str) -> dict[str, Any]:
    state = engine.state()
    return {
        "instance": state["engine_id"], "epoch": state["epoch"], "url": url, "available": 999,
    }  # fmt: skip


@pytest.fixture
def ring() -> Iterator[tuple[list[EngineProcess], EngineProcess]]:
    """Three engines of which each asks the next one first, and a lender with much room."""
    lender = EngineProcess("--pool-pages", "600", "--lend-share", "1", "--engine-id", "lender")
    share = str((LENT + 0.5) / POOL)
    flags = "--pool-pages", str(POOL), "--borrow", "--max-model-len", "4096", "--lend-share", share
    engines = [EngineProcess(*flags, "--engine-id", name) for name in NAMES]
    for engine in engines:
        engine.http.timeout = WITHIN_S
    for debtor, creditor in zip(engines, [*engines[1:], engines[0]], strict=True):
        rows = [row(creditor, creditor.url), row(lender, lender.url)]
        assert debtor.post("lend/creditors", creditors=rows).status_code == 200
    yield engines, lender
    for engine in (*engines, lender):
        engine.kill()


@pytest.fixture
def start() -> Iterator[Callable[..., RouterProcess]]:
    routers: list[RouterProcess] = []

    def router(engines: list[EngineProcess], *flags: str) -> RouterProcess:
        routers.append(RouterProcess([each.url for each in engines], "data_parallel", *flags))
        return routers[-1]

    yield router
    for each in routers:
        each.kill()


def owed(engine: EngineProcess) -> dict[str, int]:
    borrowed: dict[str, int] = engine.state()["heartbeat"]["borrowed"]
    return borrowed


def in_a_ring(engines: list[EngineProcess]) -> bool:
    nexts = [*NAMES[1:], NAMES[0]]
    return all(
        owed(engine).get(creditor, 0) >= 2 * BLOCK
        for engine, creditor in zip(engines, nexts, strict=True)
    )


def swaps(router: RouterProcess) -> dict[str, Any]:
    found: dict[str, Any] = router.http.get("/admin/ledger").json()["swaps"]
    return found


def test_blocks_come_home_in_mid_decode_and_the_tokens_are_those_of_one_engine(ring, start):
    """IL9: the ring of debts goes; what the lender holds stays there."""
    engines, lender = ring
    running = Generations(2000)
    try:
        for engine in engines:  # in turn, so that each finds its creditor with room
            running.start(engine)
        assert in_a_ring(engines)
        router = start([*engines, lender])
        ended = until(lambda: swaps(router)["ended"], WITHIN_S)
        at = [len(each) for each in running.tokens]
        assert all(length < 1900 for length in at)  # in mid-decode
        assert sorted(ended[-1]["cycle"]) == NAMES and ended[-1]["blocks"] >= 2
        assert ended[-1]["outcome"] != "nothing" and ended[-1]["refused"] == {}
        until(lambda: not all(owed(each).keys() & set(NAMES) for each in engines), WITHIN_S)
        until(
            lambda: all(len(each) > 9 + n for each, n in zip(running.tokens, at, strict=True)),
            WITHIN_S,
        )
        assert all(owed(each).get("lender") for each in engines)
        home = sum(sum(each["home"].values()) for each in swaps(router)["ended"])
        assert home >= 3 * (ended[-1]["blocks"] - 1)
        assert f"debt_swap_blocks_total {home}.0" in router.http.get("/metrics").text
    finally:
        running.end()
    for engine in (*engines, lender):
        engine.at_rest()
    with_room = EngineProcess("--pool-pages", "600")
    try:
        for number, tokens in enumerate(running.tokens):
            whole = with_room.generate(prompt(number), max_tokens=len(tokens))
            assert tokens == [token for event in whole for token in event.get("token_ids", [])]
            assert len(set(tokens)) > 10
    finally:
        with_room.kill()

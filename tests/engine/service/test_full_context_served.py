"""SmolLM2 at its full context, over engine processes whose pools hold a part of it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from debtor_processes import name_creditors, tokens
from engine_process import EngineProcess

from engine.protocol import BLOCK_TOKENS
from engine.scheduling.long_generations import FREE_SHARE

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.thorough]

CONTEXT = 8192
PAGE = 16
NEW = 16
BLOCK = BLOCK_TOKENS // PAGE  # pages
FLAGS = ("--dtype", "float32", "--max-model-len", str(CONTEXT))
CALL_S = 3600.0  # a prompt takes minutes, and many on a busy machine


def blocks_away(pool: int) -> int:
    """Return how many blocks of the context leave a pool of so many pages.

    A context that runs alone on an engine that lends nothing keeps all of the pool but a share,
    or two blocks (`LongGenerations._share`).
    """
    kept = pool - max(pool // FREE_SHARE, 2 * BLOCK)
    return -(-(CONTEXT // PAGE - kept) // BLOCK)


def started(*flags: str) -> EngineProcess:
    engine = EngineProcess(*FLAGS, *flags, model="smollm2")
    engine.http.timeout = CALL_S
    return engine


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    """Random tokens up to the last positions of the context."""
    rng = random.Random(0)
    return [rng.randrange(20, 40_000) for _ in range(CONTEXT - NEW)]


@pytest.fixture(scope="module")
def expected(prompt: list[int]) -> Iterator[list[int]]:
    """The tokens of one engine whose pool holds everything."""
    engine = started("--pool-pages", str(CONTEXT // PAGE + 32))
    try:
        found = tokens(engine.generate(prompt, max_tokens=NEW))
    finally:
        engine.kill()
    assert len(found) == NEW
    assert len(set(found)) > 3
    yield found


@pytest.mark.timeout(2 * CALL_S)
@pytest.mark.parametrize(("times", "engines"), [(3.0, 4), (1.5, 2), (3.0, 2), (1.5, 4), (6.0, 7)])
def test_the_full_context_over_small_pools(
    times: float, engines: int, prompt: list[int], expected: list[int]
):
    """A context of 1.5, 3 and 6 times the pool gives the tokens of one large engine.

    Creditors lend as many blocks as leave, in equal parts, so each of them has to answer.
    """
    pool = int(CONTEXT / PAGE / times)
    away, creditors = blocks_away(pool), engines - 1
    parts = [away // creditors + (number < away % creditors) for number in range(creditors)]
    assert min(parts) > 1  # the last block to leave is not the only one that a creditor has
    running: list[EngineProcess] = []
    try:
        debtor = started("--pool-pages", str(pool), "--borrow", "--engine-id", "debtor")
        running.append(debtor)
        for number, blocks in enumerate(parts):
            flags = ("--pool-pages", str(blocks * BLOCK), "--lend-share", "1")
            running.append(started(*flags, "--engine-id", f"c{number}"))
            assert running[-1].state()["heartbeat"]["most"] == blocks * BLOCK
        name_creditors(debtor, *running[1:], available=max(parts) * BLOCK)
        assert tokens(debtor.generate(prompt, max_tokens=NEW)) == expected
        debtor.at_rest()
        for engine in running[1:]:
            assert engine.state()["lending"]["answers"] > 0
    finally:
        for engine in running:
            engine.kill()

"""SmolLM2 at its full context, over engine processes whose pools hold a part of it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from debtor_processes import name_creditors, tokens
from engine_process import EngineProcess

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.thorough]

CONTEXT = 8192
PAGE = 16
NEW = 16
FLAGS = ("--dtype", "float32", "--max-model-len", str(CONTEXT))
CALL_S = 3600.0  # a prompt takes minutes, and many on a busy machine


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
@pytest.mark.parametrize(("times", "engines"), [(3.0, 4), (1.5, 2), (3.0, 2), (1.5, 4)])
def test_the_full_context_over_small_pools(
    times: float, engines: int, prompt: list[int], expected: list[int]
):
    """A context of 1.5 and 3 times the pool gives the tokens of one large engine."""
    pool = int(CONTEXT / PAGE / times)
    away = CONTEXT // PAGE - pool // 2 + 64  # at most half of the pool stays, and some to grow
    share = -(-away // (engines - 1))
    running: list[EngineProcess] = []
    try:
        debtor = started("--pool-pages", str(pool), "--borrow", "--engine-id", "debtor")
        running.append(debtor)
        for number in range(engines - 1):
            flags = ("--pool-pages", str(share + 32), "--lend-share", "1")
            running.append(started(*flags, "--engine-id", f"c{number}"))
        name_creditors(debtor, *running[1:], available=share)
        assert tokens(debtor.generate(prompt, max_tokens=NEW)) == expected
        debtor.at_rest()
        for engine in running[1:]:  # the context has no room in fewer
            assert engine.state()["lending"]["answers"] > 0
    finally:
        for engine in running:
            engine.kill()

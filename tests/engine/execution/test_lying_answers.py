"""Creditors that answer queries with nonsense: only the sequences in their pages are affected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_helpers import generation
from long_contexts import World, check_as_one_engine, prompt

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

POOL = 32  # pages: 512 tokens, 4 blocks


class LyingPlan:
    """A creditor's plan whose results are `value`, in `what` of each part."""

    def __init__(self, plan: Any, what: str, value: float) -> None:
        self._plan, self._what, self._value = plan, what, value
        self.part_ranges = plan.part_ranges

    def attend_rows(self, pages: torch.Tensor, q: torch.Tensor) -> Any:
        found = self._plan.attend_rows(pages, q)
        getattr(found, self._what).fill_(self._value)
        return found


def lie(world: World, what: str, value: float) -> Callable[[], None]:
    """Have the first creditor lie; return what makes it honest."""
    answering: Any = world.lending[0].server._answering
    honest = answering._planner
    answering._planner = lambda spans: LyingPlan(honest(spans), what, value)

    def end() -> None:
        answering._planner = honest

    return end


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("values", float("nan")),
        ("total", 0.0),
        pytest.param("top", float("nan"), marks=pytest.mark.thorough),
        pytest.param("top", float("inf"), marks=pytest.mark.thorough),
        pytest.param("total", float("nan"), marks=pytest.mark.thorough),
        pytest.param("values", 1e30, marks=pytest.mark.thorough),
    ],
)
def test_other_requests_keep_their_tokens(what: str, value: float):
    """Also those that come later, with the same prompt or with a part of it."""
    world = World(POOL, 2, 400)
    try:
        honest = lie(world, what, value)
        long = generation(1, prompt(900), max_tokens=12)
        short = [generation(n, prompt(40 * n, n), max_tokens=8) for n in (2, 3)]
        world.engine.run([long, *short])
        assert world.engine.failures() == []
        assert len(world.engine.tokens(long)) == 12
        check_as_one_engine(world.engine, short)
        honest()
        again = generation(4, prompt(900), max_tokens=8)
        part = generation(5, prompt(900)[:450], max_tokens=8)
        world.engine.run([part])
        world.engine.run([again])
        check_as_one_engine(world.engine, [part, again])
        world.check()
    finally:
        world.close()


def test_a_lie_is_not_cached_when_its_creditor_is_lost():
    """The lost blocks are computed again; what was computed from a lie stays with the sequence."""
    world = World(POOL, 2, 400)
    try:
        lie(world, "values", float("nan"))
        long = generation(1, prompt(700), max_tokens=40)

        def lose(step: int) -> None:
            if len(world.engine.tokens(long)) == 20:
                for one in world.lending:
                    world.source.greedy.add(one.name)
                    world.source.lose(one.name, world.source.loans_of(one.name))

        world.engine.between = lose
        world.engine.run([long])
        world.engine.between = lambda step: None
        world.source.greedy.clear()
        world.lending[0].server._answering._planner = world.lending[1].server._answering._planner
        again = generation(2, prompt(700), max_tokens=8)
        world.engine.run([again])
        check_as_one_engine(world.engine, [again])
        world.check()
    finally:
        world.close()

"""A step whose sequences lie here, there, and both, is attended to as on one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from creditors import EPOCH, LendingEngine, remote, small_limits

from kvcache.attention import BLOCK, held_planner_for, planner_for
from kvcache.errors import BadRequest, KVIncomplete
from kvcache.memory import KVLayout
from kvcache.remote_attention import BorrowedPages, DistributedPlan, RemoteAttention
from kvcache.sequences import Span
from kvcache.types import EngineId, LeaseId, TokenPos

PAGE, HEADS, KV_HEADS, DIM, LAYERS = 16, 4, 2, 32, 2
PER_BLOCK = BLOCK // PAGE
CPU = torch.device("cpu")
NAMES = [EngineId("one"), EngineId("two")]


class Step:
    """Three sequences: two decodes and a chunk. The first one has no pages at creditors."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.layout = KVLayout(LAYERS, 80, PAGE, KV_HEADS, DIM, dtype)
        generator = torch.Generator().manual_seed(1)
        self.pool = torch.randn(self.layout.shape, generator=generator).to(dtype)
        order = torch.randperm(79, generator=generator).add(1).numpy().astype(np.int32)
        self.spans = [
            Span(0, TokenPos(200), 1, order[:13]),
            Span(1, TokenPos(300), 40, order[13:40]),
            Span(41, TokenPos(500), 1, order[40:72]),
        ]
        rows = 44  # two of padding
        self.q, self.k, self.v = (
            torch.randn(rows, heads, DIM, generator=generator).to(dtype)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        group = HEADS // KV_HEADS
        self.planner = planner_for(self.layout, group, CPU)
        self.held_planner = held_planner_for(self.layout, group, CPU)

    def plan(
        self, borrowed: dict[int, dict[EngineId, list[BorrowedPages]]], remote_: RemoteAttention
    ) -> DistributedPlan:
        return DistributedPlan(
            self.spans,
            borrowed,
            remote_,
            planner=self.planner,
            held_planner=self.held_planner,
            page_size=PAGE,
        )

    def lend(
        self, engine: LendingEngine, pool: torch.Tensor, span: int, block: int
    ) -> BorrowedPages:
        """Move a block of a sequence from `pool` to a creditor."""
        numbers = np.arange(block * PER_BLOCK, (block + 1) * PER_BLOCK, dtype=np.int32)
        own = self.spans[span].pages[numbers]
        loan = f"{span}-{block}"
        theirs = np.array(engine.lend(loan, PER_BLOCK), np.int32)
        engine.pool[:, theirs] = pool[:, own]
        pool[:, own] = torch.nan
        return BorrowedPages(LeaseId(loan), theirs, numbers)


@pytest.fixture(
    params=[torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)],
    ids=["float32", "bfloat16"],
)
def world(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[Step, list[LendingEngine], RemoteAttention]]:
    step = Step(request.param)
    engines = [LendingEngine(name, step.layout, HEADS, limits=small_limits()) for name in NAMES]
    debtor = remote(step.layout, HEADS)
    for name, engine in zip(NAMES, engines, strict=True):
        debtor.connect(name, engine.creditor.endpoints, EPOCH)
    yield step, engines, debtor
    debtor.close()
    for engine in engines:
        engine.close()


def test_sequences_here_and_there(world: tuple[Step, list[LendingEngine], RemoteAttention]):
    step, (one, two), debtor = world
    whole, pool = step.pool.clone(), step.pool.clone()
    borrowed = {
        1: {NAMES[0]: [step.lend(one, pool, 1, 0)], NAMES[1]: [step.lend(two, pool, 1, 1)]},
        2: {NAMES[1]: [step.lend(two, pool, 2, 0), step.lend(two, pool, 2, 2)]},
    }
    expected, plan = step.planner(step.spans), step.plan(borrowed, debtor)
    close = (
        {"atol": 0.0, "rtol": 0.0}
        if step.q.dtype == torch.float32
        else {"atol": 0.01, "rtol": 0.02}
    )
    for layer in range(LAYERS):
        expected.append(whole[layer], step.k, step.v)
        plan.append(pool[layer], step.k, step.v)
        ours = plan.attend(layer, pool[layer], step.q)
        torch.testing.assert_close(ours, expected.attend(whole[layer], step.q), **close)
        assert not ours[42:].any()


def test_local_attention_is_computed_while_creditors_answer(
    world: tuple[Step, list[LendingEngine], RemoteAttention], monkeypatch: pytest.MonkeyPatch
):
    """Queries leave first, and the answers are waited for last: IL1's overlap."""
    step, (one, _), debtor = world
    pool, calls = step.pool.clone(), list[str]()
    plan = step.plan({1: {NAMES[0]: [step.lend(one, pool, 1, 0)]}}, debtor)

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            calls.append(name)
            return call(*given)

        return called

    assert plan._held is not None and plan._plain is not None
    for owner, name in (
        (debtor, "send"),
        (plan._held, "attend_rows"),
        (plan._plain, "attend"),
        (debtor, "receive"),
    ):
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    for layer in range(LAYERS):
        plan.append(pool[layer], step.k, step.v)
        plan.attend(layer, pool[layer], step.q)
    assert len(calls) == 4 * LAYERS
    for layer in range(LAYERS):
        sent, *local, received = calls[4 * layer : 4 * layer + 4]
        assert (sent, received) == ("send", "receive")
        assert sorted(local) == ["attend", "attend_rows"]


def test_a_step_that_borrows_nothing_asks_nobody(
    world: tuple[Step, list[LendingEngine], RemoteAttention],
):
    step, engines, debtor = world
    plan, expected = step.plan({}, debtor), step.planner(step.spans)
    found = plan.attend(0, step.pool[0], step.q)
    assert torch.equal(found, expected.attend(step.pool[0], step.q))
    assert all(engine.creditor.statistics().answers == 0 for engine in engines)


def test_keys_that_nobody_has_are_missed(
    world: tuple[Step, list[LendingEngine], RemoteAttention],
):
    """The creditor has fewer pages than the debtor's table leaves out."""
    step, (one, _), debtor = world
    pages = step.lend(one, step.pool, 1, 0)
    step.spans[1].pages[:PER_BLOCK] = -1
    some = BorrowedPages(pages.loan, pages.pages[:-1], pages.numbers[:-1])
    with pytest.raises(KVIncomplete):
        step.plan({1: {NAMES[0]: [some]}}, debtor)
    late = BorrowedPages(pages.loan, pages.pages, pages.numbers + 40)
    with pytest.raises(BadRequest, match="behind the rows"):
        step.plan({1: {NAMES[0]: [late]}}, debtor)

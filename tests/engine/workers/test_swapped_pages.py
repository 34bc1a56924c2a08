"""Steps in a memory smaller than the pool: what they compute, and what comes back to the pool."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.workers.part.swapped_pages import SwapCounts, SwappedPages
from kvcache.errors import NoCapacity
from kvcache.memory import KVLayout, LocalRegion
from kvcache.page_store import TorchPageStore
from kvcache.sequences import Span, StepDescription
from kvcache.types import TokenPos

PAGE, HEADS, GROUP, DIM, LAYERS, PAGES = 16, 2, 2, 8, 3, 40
LAYOUT = KVLayout(LAYERS, PAGES, PAGE, HEADS, DIM, torch.float32)
TOKEN_BYTES = LAYERS * LAYOUT.token_bytes


def span(row: int, start: int, count: int, *pages: int) -> Span:
    return Span(row, TokenPos(start), count, np.array(pages, dtype=np.int32))


def step(*spans: Span) -> StepDescription:
    return StepDescription((), spans)


class Steps:
    """The same steps on pages that are swapped, and on a pool that holds all of them."""

    def __init__(self, pages: int) -> None:
        self.source = torch.Generator().manual_seed(1)
        self.host, self.whole = LocalRegion(LAYOUT), LocalRegion(replace(LAYOUT))
        self.swapped = SwappedPages(self.host.pool, LAYOUT, pages, query_heads=HEADS * GROUP)
        self.store = TorchPageStore(self.whole, query_heads=HEADS * GROUP)
        self.done: list[tuple[Exception | None, SwapCounts]] = []
        self.all_done = threading.Condition()

    def finished(self, failure: Exception | None, counts: SwapCounts) -> None:
        with self.all_done:
            self.done.append((failure, counts))
            self.all_done.notify_all()

    def wait(self, count: int) -> None:
        with self.all_done:
            assert self.all_done.wait_for(lambda: len(self.done) >= count, 10)

    def compute(self, of: StepDescription) -> None:
        """Compute a step that was announced, in all layers, on both; the results are equal."""
        rows = sum(one.count for one in of.spans)
        self.store.begin(of)
        self.swapped.begin()
        for layer in range(LAYERS):
            q = torch.randn(rows, HEADS * GROUP, DIM, generator=self.source)
            k, v = (torch.randn(rows, HEADS, DIM, generator=self.source) for _ in "kv")
            assert torch.equal(
                self.swapped.attention(layer, q, k, v), self.store.attention(layer, q, k, v)
            )
        self.store.end()
        self.swapped.end(self.finished)


@pytest.fixture
def steps():
    made = Steps(12)
    yield made
    made.swapped.close()


def test_steps_compute_as_in_a_pool_that_holds_all(steps):
    """Chunks, decodes, a prefix that two share, and pages in any order."""
    plan = [
        step(span(0, 0, 40, 7, 3, 9)),
        step(span(0, 0, 20, 30, 2)),
        step(span(0, 40, 1, 7, 3, 9), span(1, 32, 5, 7, 3, 11)),
        step(span(0, 20, 30, 30, 2, 4, 39)),
        step(span(0, 41, 1, 7, 3, 9), span(1, 37, 1, 7, 3, 11)),
        step(span(0, 50, 1, 30, 2, 4, 39)),
    ]
    for one in plan:
        steps.swapped.announce(one)
    for one in plan:
        steps.compute(one)
    steps.wait(len(plan))
    assert all(failure is None for failure, _ in steps.done)
    assert torch.equal(steps.host.pool, steps.whole.pool)
    written = [counts.written_bytes for _, counts in steps.done]
    assert written == [TOKEN_BYTES * n for n in (40, 20, 6, 30, 2, 1)]  # new tokens only
    fetched = [counts.fetched_bytes for _, counts in steps.done]
    # A prefix that two sequences share comes once; a page without tokens does not come.
    assert fetched == [TOKEN_BYTES * PAGE * n for n in (0, 0, 3, 2, 4, 4)]


def test_what_others_put_into_the_pool_is_seen(steps):
    """The pool belongs to the lead: it copies pages there, and peers put into it."""
    first = step(span(0, 0, 16, 5))
    steps.swapped.announce(first)
    steps.compute(first)
    steps.wait(1)
    for region in (steps.host, steps.whole):
        region.pool[:, 6] = region.pool[:, 5] * 2
    second = step(span(0, 16, 1, 6, 8))
    steps.swapped.announce(second)
    steps.compute(second)
    steps.wait(2)
    assert torch.equal(steps.host.pool, steps.whole.pool)


def test_a_step_waits_for_what_an_earlier_one_writes(steps):
    """The chunks of one prompt, all announced before the first is computed."""
    plan = [step(span(0, begin, 20, *range(1, 8)[: -(-(begin + 20) // PAGE)])) for begin in
            range(0, 80, 20)]  # fmt: skip
    for one in plan:
        steps.swapped.announce(one)
    for one in plan:
        steps.compute(one)
    steps.wait(len(plan))
    assert torch.equal(steps.host.pool, steps.whole.pool)


def test_a_step_that_fails_writes_nothing_back_and_later_ones_go_on(steps):
    failing, after = step(span(0, 0, 16, 5)), step(span(0, 0, 3, 6))
    steps.swapped.announce(failing)
    steps.swapped.announce(after)
    steps.swapped.begin()
    rows = torch.ones(16, HEADS, DIM)
    steps.swapped.attention(0, torch.ones(16, HEADS * GROUP, DIM), rows, rows)
    steps.swapped.abort(steps.finished)
    steps.wait(1)
    assert not steps.host.pool[:, 5].any()
    assert steps.done[0][1].written_bytes == 0
    steps.compute(after)
    steps.wait(2)
    assert torch.equal(steps.host.pool, steps.whole.pool)


def test_a_step_with_more_pages_than_half_of_the_memory_is_refused(steps):
    steps.swapped.announce(step(span(0, 6 * PAGE, 1, *range(1, 8))))
    with pytest.raises(NoCapacity, match="7 pages, where 6 fit"):
        steps.swapped.begin()
    steps.swapped.abort(steps.finished)
    after = step(span(0, 0, 16, 5))
    steps.swapped.announce(after)
    steps.compute(after)
    steps.wait(2)
    assert steps.done[1][0] is None


def test_the_next_step_is_fetched_while_one_is_computed(steps):
    """And not the one after: its half is free only when the first has been written back."""
    plan = [step(span(0, 0, 16, number, number + 1)) for number in (1, 3, 5)]
    for one in plan:
        steps.swapped.announce(one)
    steps.swapped.begin()
    with steps.swapped._changed:
        assert steps.swapped._changed.wait_for(lambda: len(steps.swapped._fetched) == 2, 10)
        assert len(steps.swapped._announced) == 1
    steps.swapped.abort(steps.finished)
    for _ in plan[1:]:
        steps.swapped.begin()
        steps.swapped.abort(steps.finished)
    steps.wait(3)

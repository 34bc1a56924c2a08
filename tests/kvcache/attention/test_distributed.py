"""Attention over the pools of several holders is the attention of one engine, to the bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_holders import Shape, Split, bits
from attention_world import BACKENDS, CPU, backend
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from kvcache.attention import (
    HeldSpan,
    MergedSpan,
    MergePlan,
    Part,
    PartialAttention,
    PartRows,
    combine,
    held_planner_for,
)
from kvcache.attention.block_tree import BLOCK
from kvcache.attention.distributed import fold_parts
from kvcache.errors import BadRequest, KVIncomplete
from kvcache.memory.layout import KVLayout
from kvcache.sequences import Span
from kvcache.types import TokenPos

TINY, SMOLLM2 = Shape(2, 2, 32), Shape(3, 3, 64)
PAGE = 16
PER_BLOCK = BLOCK // PAGE


@pytest.fixture(autouse=True, params=BACKENDS, scope="module")
def attention(request: pytest.FixtureRequest) -> Iterator[None]:
    with backend(request.param):
        yield


def merged(split: Split, parts: list[Part]) -> torch.Tensor:
    return combine(parts, start=split.start, count=split.count).output(split.q.dtype)


def blocks(owners: list[int], per_block: int = PER_BLOCK) -> list[int]:
    """Return the owner of each page of these blocks."""
    return [owner for owner in owners for _ in range(per_block)]


@st.composite
def splits(draw: st.DrawFn) -> Split:
    """Decodes and chunks of a context whose blocks lie with up to seven holders."""
    page_size = draw(st.sampled_from([16, 64, BLOCK]))
    holders = draw(st.integers(1, 7))
    owners = draw(st.lists(st.integers(0, holders - 1), min_size=9, max_size=9))
    length = draw(st.integers(1, 9 * BLOCK))
    count = min(draw(st.sampled_from([1, 1, 2, 7, 64, 65, 130, 400])), length)
    shape = draw(st.sampled_from([TINY, SMOLLM2]))
    where = blocks(owners, BLOCK // page_size)
    return Split(length, length - count, where, shape, page_size=page_size)


@given(splits(), st.randoms(use_true_random=False))
@settings(max_examples=25)
@pytest.mark.slow
def test_any_placement_of_blocks_gives_the_bits_of_one_engine(split: Split, rng: random.Random):
    parts = split.all_parts()
    rng.shuffle(parts)
    assert all(part.node for part in parts)
    assert torch.equal(bits(merged(split, parts)), bits(split.local))


@given(st.lists(splits(), min_size=1, max_size=4), st.randoms(use_true_random=False))
@settings(max_examples=15)
@pytest.mark.slow
def test_parts_of_many_spans_merge_together_to_the_same_bits(some: list[Split], rng: random.Random):
    heads, dim = some[0].q.shape[1:]
    some = [split for split in some if split.q.shape[1:] == (heads, dim)]
    sources, spans, at, row = [], [], 0, 1  # row 0 is another sequence's
    for split in some:
        parts = split.all_parts()
        rng.shuffle(parts)
        own = []
        for part in parts:
            own.append(PartRows(part.begin, part.end, at))
            sources.append(part.attention)
            at += split.count
        spans.append(MergedSpan(row, split.start, split.count, own))
        row += split.count
    together = torch.full((row, heads, dim), 7.0)
    MergePlan(spans).write(sources, together)
    expected = torch.cat([split.local for split in some])
    assert (together[0] == 7.0).all()
    assert torch.equal(bits(together[1:]), bits(expected))


@pytest.mark.parametrize(
    ("holders", "threads"),
    [
        (each, threads)
        if (each, threads) in ((2, 1), (7, 1))
        else pytest.param(each, threads, marks=pytest.mark.thorough)
        for each in range(1, 8)
        for threads in (1, 2)
    ],
)
@pytest.mark.slow
def test_the_bits_of_a_long_context_in_turn(holders: int, threads: int):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        owners = blocks([block % holders for block in range(24)])
        split = Split(3000, 2999, owners, SMOLLM2)
        assert torch.equal(bits(merged(split, split.all_parts())), bits(split.local))
    finally:
        torch.set_num_threads(before)


def test_a_decode_is_the_last_row_of_the_prompt_wherever_its_blocks_lie():
    """A prompt is computed in one chunk on one engine, its last token again over two holders."""
    split = Split(700, 699, blocks([0, 0, 1, 1, 0, 1]), SMOLLM2)
    pages = np.array(split.world.sequences[0].pages, np.int32)
    plan = split.world.planner([Span(0, TokenPos(0), 700, pages)])
    whole = plan.attend(split.world.pool, split.world.sequences[0].q)
    assert torch.equal(bits(merged(split, split.all_parts())), bits(whole[-1:]))


def test_a_holder_answers_with_one_part_per_node():
    """Blocks 1 to 7 are nodes [1, 2), [2, 4), [4, 8); blocks 8 and 9 are a node."""
    split = Split(10 * BLOCK, 10 * BLOCK - 1, blocks([0, *[1] * 7, 2, 2]), TINY)
    found = {
        holder: [(part.begin // BLOCK, part.end // BLOCK) for part in split.parts(holder)]
        for holder in range(4)
    }
    assert found == {0: [(0, 1)], 1: [(1, 2), (2, 4), (4, 8)], 2: [(8, 10)], 3: []}
    part = split.parts(2)[0]
    assert part.attention.nbytes == 4 * (4 * 32 + 8)  # heads·(4·head_dim + 8) for one row


def test_the_last_block_is_whole_with_the_pages_that_have_keys():
    split = Split(BLOCK + 17, BLOCK + 16, [0] * PER_BLOCK + [1, 1], TINY)
    assert [part.node for part in split.parts(1)] == [(0, 1)]
    assert torch.equal(bits(merged(split, split.all_parts())), bits(split.local))


def test_rows_see_no_keys_after_their_own():
    """The chunk begins in block 0 and ends in block 2; each holder has one of the blocks."""
    split = Split(300, 100, blocks([0, 1, 2]), SMOLLM2)
    for holder, begin in enumerate([0, BLOCK, 2 * BLOCK]):
        (part,) = split.parts(holder)
        blind = max(begin - 100, 0)
        assert not part.attention.total[:blind].any()
        assert not part.attention.values[:blind].any()
        assert part.attention.total[blind:].min() >= 1
        assert (part.attention.log_sum_exp()[:blind] == -torch.inf).all()
    assert torch.equal(bits(merged(split, split.all_parts())), bits(split.local))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [TINY, SMOLLM2])
@given(seed=st.integers(0, 1000), count=st.sampled_from([1, 5, 130]))
@example(seed=0, count=1)
@settings(max_examples=5)
@pytest.mark.slow
def test_any_placement_of_pages_agrees_up_to_rounding(
    shape: Shape, dtype: torch.dtype, seed: int, count: int
):
    """Blocks are divided between holders. The golden numbers are torch's, in float64."""
    rng = random.Random(seed)
    length = rng.randint(count, 700)
    owners = [rng.randrange(4) for _ in range(-(-length // PAGE))]
    split = Split(length, length - count, owners, shape, dtype=dtype)
    sequence = split.world.sequences[0]
    q, k, v = (getattr(sequence, name).transpose(0, 1)[None].double() for name in "qkv")
    golden = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    golden = golden[0].transpose(0, 1)[split.start :]
    ours = merged(split, split.all_parts())
    assert ours.dtype == dtype
    close = {"atol": 2e-6, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 0.01, "rtol": 0.01}
    torch.testing.assert_close(ours.double(), golden, **close)
    torch.testing.assert_close(ours, split.local, **close)


@pytest.mark.slow
def test_bfloat16_holders_merge_runs_of_pages():
    split = Split(1000, 999, [0] * 20 + [1] * 30 + [0] * 13, SMOLLM2, dtype=torch.bfloat16)
    assert [(part.begin, part.end) for part in split.parts(0)] == [(0, 320), (800, 1008)]
    assert [(part.begin, part.end) for part in split.parts(1)] == [(320, 800)]
    torch.testing.assert_close(merged(split, split.all_parts()), split.local, atol=0.01, rtol=0.01)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
def test_several_sequences_at_once(dtype: torch.dtype):
    """Spans with pages at different numbers, one of them without any, are as each one alone."""
    one = Split(400, 399, blocks([0, 1, 1, 0]), TINY, dtype=dtype)
    pages = np.array(one.world.sequences[0].pages, np.int32)
    numbers, none = np.arange(len(pages), dtype=np.int32), np.empty(0, np.int32)
    spans = [
        HeldSpan(0, TokenPos(399), 1, pages[8:24], numbers[8:24]),
        HeldSpan(1, TokenPos(5), 2, none, none),
        HeldSpan(3, TokenPos(300), 9, pages[:8], numbers[:8]),
    ]
    q = one.world.sequences[0].q
    step = torch.cat([q[399:], q[5:7], q[300:309]])
    found = one.planner(spans).attend(one.world.pool, step)
    assert [len(parts) for parts in found] == [2 if dtype == torch.float32 else 1, 0, 1]
    close = {"atol": 0.0, "rtol": 0.0} if dtype == torch.float32 else {"atol": 0.01, "rtol": 0.01}
    for span, parts in zip(spans, found, strict=True):
        rows = step[span.row : span.row + span.count]
        (alone,) = one.planner([replace(span, row=0)]).attend(one.world.pool, rows)
        for part, other in zip(parts, alone, strict=True):
            assert part[:2] == other[:2]
            ours, expected = part.attention.output(), other.attention.output()
            torch.testing.assert_close(ours, expected, **close)


def test_nothing_held_is_the_neutral_result():
    split = Split(300, 290, [0] * 19, SMOLLM2)
    assert split.parts(1) == []
    neutral = PartialAttention.neutral(10, 9, 64)
    assert fold_parts([], neutral) is neutral
    parts = split.all_parts()
    alone, with_neutral = combine(parts, start=TokenPos(290), count=10), fold_parts(parts, neutral)
    assert torch.equal(bits(with_neutral.merge(neutral).values), bits(alone.values))


def test_missing_and_repeated_keys_are_refused():
    split = Split(600, 598, blocks([0, 1, 2, 1, 0]), TINY)
    parts = split.all_parts()
    with pytest.raises(KVIncomplete, match="from 256 on, of 600"):
        combine(split.parts(0) + split.parts(1), start=split.start, count=2)
    with pytest.raises(KVIncomplete, match="from 0 on"):
        combine([], start=split.start, count=2)
    with pytest.raises(BadRequest, match=r"keys \[128, 256\) are in two parts"):
        combine([*parts, split.parts(1)[0]], start=split.start, count=2)
    with pytest.raises(BadRequest, match="no keys"):
        combine([*parts, parts[0]._replace(end=parts[0].begin)], start=split.start, count=2)
    with pytest.raises(BadRequest, match=r"a part is \[2, 4, 32\], not \[3, 4, 32\]"):
        combine(parts, start=TokenPos(597), count=3)


def held(numbers: list[int], pages: list[int], **changes: int) -> HeldSpan:
    rows = {"row": 0, "start": 20, "count": 1, **changes}
    return HeldSpan(
        rows["row"], TokenPos(rows["start"]), rows["count"],
        np.array(pages, np.int32), np.array(numbers, np.int32),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("span", "message"),
    [
        (held([0, 1], [1]), "1 pages with 2 numbers"),
        (held([0, 0], [1, 2]), "two pages with the same number"),
        (held([-1], [1]), "negative"),
        (held([0], [-1]), "negative"),
        (held([0], [1], count=0), "no rows"),
        (held([0], [1], start=-1), "no rows"),
        (held([0], [1], row=-1), "no rows"),
    ],
)
def test_bad_spans_are_refused(span: HeldSpan, message: str, dtype: torch.dtype):
    planner = held_planner_for(KVLayout(1, 4, PAGE, 2, 32, dtype), 2, CPU)
    with pytest.raises(BadRequest, match=message):
        planner([span])


@pytest.mark.parametrize(
    ("q", "pool", "message"),
    [
        ((1, 4, 16), (4, 2, PAGE, 2, 32), r"queries \[1, 4, 16\] do not fit"),
        ((1, 6, 32), (4, 2, PAGE, 2, 32), "6 query heads for 2 KV heads in groups of 2"),
        ((0, 4, 32), (4, 2, PAGE, 2, 32), "row 0 of 0 rows"),
        ((1, 4, 32), (3, 2, PAGE, 2, 32), "page 3 of 3 pages"),
        ((4, 32), (4, 2, PAGE, 2, 32), r"queries \[4, 32\] do not fit"),
    ],
)
def test_queries_and_pools_that_do_not_fit_are_refused(
    q: tuple[int, ...], pool: tuple[int, ...], message: str
):
    plan = held_planner_for(KVLayout(1, 4, PAGE, 2, 32, torch.float32), 2, CPU)([held([0], [3])])
    with pytest.raises(BadRequest, match=message):
        plan.attend(torch.zeros(pool), torch.zeros(q))
    with pytest.raises(BadRequest, match=r"torch\.float32 for pages in torch\.bfloat16"):
        plan.attend(torch.zeros(4, 2, PAGE, 2, 32, dtype=torch.bfloat16), torch.zeros(1, 4, 32))


def test_a_page_size_that_does_not_divide_the_block_is_refused():
    with pytest.raises(BadRequest, match="page size 48 does not divide 128"):
        held_planner_for(KVLayout(1, 4, 48, 1, 16, torch.float32), 1, CPU)([held([0], [1])])

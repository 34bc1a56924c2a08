"""The copied bytes, between pages and between different shards of a model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.memory.layout import KVLayout
from kvcache.memory.region import LocalRegion
from kvcache.shard import Shard, overlap
from kvcache.transport.mapped import MappedTarget
from kvcache.transport.runs import PageRoute
from kvcache.types import PageId

SIZE = 4
WHOLE = KVLayout(3, 6, SIZE, 2, 8, torch.float32)


def numbered(pages: range, data: st.DataObject) -> list[PageId]:
    return [PageId(page) for page in data.draw(st.permutations(pages))]


def part(data: st.DataObject, layers: int, heads: int) -> Shard:
    layer, head = data.draw(st.integers(0, layers - 1)), data.draw(st.integers(0, heads - 1))
    return Shard(
        layer,
        data.draw(st.integers(layer + 1, layers)),
        head,
        data.draw(st.integers(head + 1, heads)),
    )


@settings(max_examples=150, deadline=None)
@given(st.data())
@pytest.mark.slow
def test_the_common_span_is_copied_once(data: st.DataObject):
    """Any two shards of a model, any pages, any positions, some layers, small batches."""
    layers, heads, length = (data.draw(st.integers(1, most)) for most in (4, 4, 30))
    count = -(-length // SIZE)
    begin = data.draw(st.integers(0, length - 1))
    end = data.draw(st.integers(begin + 1, length))
    # The receiver matched the positions before this one; the lease has no pages for them.
    first = data.draw(st.integers(0, begin // SIZE))
    whole = KVLayout(layers, count + 1, SIZE, heads, 2, torch.float32)
    source = LocalRegion(replace(whole, shard=part(data, layers, heads)))
    target = LocalRegion(replace(whole, pages=count - first + 3, shard=part(data, layers, heads)))
    ours, theirs = source.layout.held, target.layout.held
    source_pages = numbered(range(1, count + 1), data)
    target_pages = numbered(range(1, count - first + 3), data)[: count - first]
    source.pool.copy_(torch.arange(1.0, 1 + source.pool.numel()).view(source.pool.shape))
    low = data.draw(st.integers(0, ours.layers - 1))
    written = range(low, data.draw(st.integers(low + 1, ours.layers)))

    wanted = torch.zeros_like(target.pool)
    common = overlap(ours, theirs)
    if common is not None:
        for layer in written:
            mine, its = layer, layer + ours.layer - theirs.layer
            if 0 <= its < theirs.layers:
                for position in range(begin, end):
                    page, slot = divmod(position, SIZE)
                    wanted[its, target_pages[page - first], :, slot, common.heads_in(theirs)] = (
                        source.pool[mine, source_pages[page], :, slot, common.heads_in(ours)]
                    )

    most = data.draw(st.sampled_from([8, 100, 1000, 1 << 20]))
    route = PageRoute(source.layout, target.layout, target_pages, first)
    copied = 0
    for runs, size in route.batches(written, source_pages, begin, end, most):
        assert 0 < size == int(runs[:, 2].sum()) <= most
        assert int(runs[:, 2].min()) > 0
        copied += size
        MappedTarget(source, target).copy(runs)
    assert torch.equal(target.pool, wanted)
    assert copied == int(wanted.count_nonzero()) * 4


def test_pages_in_a_row_on_both_sides_are_one_run():
    layout = replace(WHOLE, layers=1, pages=11, head_dim=1, kv_heads=2)
    pages = [PageId(p) for p in (3, 4, 5, 9, 10)]
    route = PageRoute(layout, layout, [PageId(p) for p in (1, 2, 3, 4, 6)], 0)
    ((runs, _),) = route.batches(range(1), pages, 0, 20, 1 << 20)
    page = 2 * 4 * 8
    assert runs.tolist() == [[3 * page, page, 3 * page], [9 * page, 4 * page, page],
                             [10 * page, 6 * page, page]]  # fmt: skip


def test_a_page_is_one_run_in_all_layers():
    pages, others = [PageId(4), PageId(2)], [PageId(3), PageId(5)]
    ((runs, _),) = PageRoute(WHOLE, WHOLE, others, 0).batches(range(3), pages, 0, 8, 1 << 20)
    page = WHOLE.page_bytes
    assert runs.tolist() == [[4 * page, 3 * page, page], [2 * page, 5 * page, page]]


def test_a_layer_alone_is_a_run_a_page():
    pages = [PageId(2), PageId(3)]
    ((runs, _),) = PageRoute(WHOLE, WHOLE, pages, 0).batches(range(1, 2), pages, 0, 8, 1 << 20)
    page, layer = WHOLE.page_bytes, WHOLE.layer_bytes
    assert runs.tolist() == [[p * page + layer] * 2 + [layer] for p in (2, 3)]


def test_small_spans_of_many_layers_are_one_batch():
    layout = replace(WHOLE, layers=30)
    route = PageRoute(layout, layout, [PageId(1), PageId(2)], 0)
    ((runs, _),) = route.batches(range(30), [PageId(3), PageId(4)], 5, 6, 1 << 20)
    assert runs.shape == (60, 3)  # keys and values of each layer


def test_a_large_span_is_cut_evenly():
    layout = replace(WHOLE, pages=100)
    pages = [PageId(page) for page in range(1, 91)]
    route = PageRoute(layout, layout, pages, 0)
    layer = 90 * SIZE * layout.token_bytes
    batches = list(route.batches(range(3), pages, 0, 360, layer - 1))
    *alike, last = [size for _, size in batches]
    assert alike == [9 * 4096] * 3 and sum((*alike, last)) == 3 * layer and last <= alike[0]


def test_cuts_keep_the_alignment_of_runs():
    """Three parts of equal bytes would begin at odd bytes."""
    layout = KVLayout(2, 400, 16, 2, 64, torch.bfloat16)
    pages = [PageId(page) for page in range(1, 314)]
    route = PageRoute(layout, layout, [PageId(400 - page) for page in pages], 0)
    batches = list(route.batches(range(2), pages, 0, 5000, 5000 * 1024 // 3 + 4096))
    assert len(batches) == 3
    cuts = np.concatenate([runs for runs, _ in batches])
    assert not (cuts % 256).any()


@pytest.mark.parametrize("shard", [Shard(0, 1, 0, 2), Shard(0, 3, 0, 1)])
def test_shards_without_common_elements_copy_nothing(shard: Shard):
    other = Shard(1, 3, 0, 2) if shard.heads == 2 else Shard(0, 3, 1, 2)
    route = PageRoute(replace(WHOLE, shard=shard), replace(WHOLE, shard=other), [PageId(1)], 0)
    assert not list(route.batches(range(shard.layers), [PageId(1)], 0, 4, 1 << 20))


def test_other_workers_layers_are_left_out():
    """Of the requested layers, those of the receiver are copied, by its own layer indices."""
    ours, theirs = replace(WHOLE, shard=Shard(0, 2, 0, 2)), replace(WHOLE, shard=Shard(1, 3, 0, 2))
    route = PageRoute(ours, theirs, [PageId(2)], 0)
    ((runs, _),) = route.batches(range(2), [PageId(1)], 0, 4, 1 << 20)
    page = SIZE * WHOLE.token_bytes
    assert np.array_equal(runs, [[ours.page_bytes + page, 2 * theirs.page_bytes, page]])


def test_pages_in_a_row_behind_a_part_of_one_are_one_run():
    """The parts of the first page, keys and values, are shorter."""
    layout = replace(WHOLE, layers=1, pages=11, head_dim=1)
    pages, others = ([PageId(page) for page in run] for run in ((3, 4, 5, 6), (6, 7, 8, 9)))
    ((runs, size),) = PageRoute(layout, layout, others, 0).batches(range(1), pages, 2, 14, 1 << 20)
    token, page = 8, 64
    assert runs.tolist() == [
        [3 * page + 2 * token, 6 * page + 2 * token, 2 * token],
        [3 * page + 6 * token, 6 * page + 6 * token, 2 * token],
        [6 * page, 9 * page, 2 * token],
        [6 * page + 4 * token, 9 * page + 4 * token, 2 * token],
        [4 * page, 7 * page, 2 * page],
    ]
    assert size == 12 * 2 * token


def test_pages_in_a_row_on_one_side_alone_are_separate_runs():
    layout = replace(WHOLE, layers=1, pages=11)
    row, mixed = ([PageId(page) for page in run] for run in ((3, 4, 5), (5, 3, 4)))
    page = layout.page_bytes
    for ours, theirs in ((row, mixed), (mixed, row)):
        ((runs, _),) = PageRoute(layout, layout, theirs, 0).batches(range(1), ours, 0, 12, 1 << 20)
        joined = [[3 * page, 5 * page, page], [4 * page, 3 * page, 2 * page]]
        if ours is mixed:
            joined = [[5 * page, 3 * page, page], [3 * page, 4 * page, 2 * page]]
        assert runs.tolist() == joined


@pytest.mark.parametrize("layers", [range(0), range(2, 2), range(3, 5)])
def test_no_layers_are_no_runs(layers: range):
    route = PageRoute(WHOLE, WHOLE, [PageId(1)], 0)
    assert not list(route.batches(layers, [PageId(1)], 0, 4, 1 << 20))


def test_no_positions_are_no_runs():
    route = PageRoute(WHOLE, WHOLE, [PageId(1)], 0)
    for position in (0, 2, 4):
        assert not list(route.batches(range(3), [PageId(1)], position, position, 1 << 20))


def test_a_batch_may_end_within_a_run():
    layout = replace(WHOLE, layers=1, pages=5)
    pages = [PageId(1), PageId(2), PageId(3)]
    page = layout.page_bytes
    route = PageRoute(layout, layout, [PageId(2), PageId(3), PageId(4)], 0)
    one, two = route.batches(range(1), pages, 0, 12, 3 * page - 1)
    half = 3 * page // 2
    assert one[0].tolist() == [[page, 2 * page, half]] and one[1] == half
    assert two[0].tolist() == [[page + half, 2 * page + half, half]] and two[1] == half
    ((whole, size),) = route.batches(range(1), pages, 0, 12, 3 * page)
    assert whole.tolist() == [[page, 2 * page, 3 * page]] and size == 3 * page

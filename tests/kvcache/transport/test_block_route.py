"""Routes between pools of opaque blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcache.errors import BadAddress
from kvcache.memory import BlockLayout, KVLayout
from kvcache.shard import Shard
from kvcache.transport.runs import BlockRoute, route_between
from kvcache.types import PageId


def layout(by_block: bool, pages: int = 8) -> BlockLayout:
    return BlockLayout(layers=3, pages=pages, page_size=4, layer_bytes=16, by_block=by_block)


def fill(pool: np.ndarray, like: BlockLayout) -> None:
    """Give each block of each layer a value of its own."""
    for layer in range(like.layers):
        for block in range(like.pages):
            at = layer * like.layer_stride + block * like.block_stride
            pool[at : at + like.layer_bytes] = 1 + layer * like.pages + block


def copied(source: BlockLayout, target: BlockLayout, **where) -> np.ndarray:
    """Return the target's pool after the runs of one route are copied; untouched bytes are 0."""
    ours, theirs = np.zeros(source.nbytes, np.uint8), np.zeros(target.nbytes, np.uint8)
    fill(ours, source)
    route = BlockRoute(source, target, where["theirs"], where["first"])
    batches = list(
        route.batches(where["layers"], where["ours"], where["begin"], where["end"], 1 << 20)
    )
    for runs, size in batches:
        assert size == runs[:, 2].sum()
        for start, to, length in runs.tolist():
            theirs[to : to + length] = ours[start : start + length]
    return theirs


@pytest.mark.parametrize("by_block", [True, False])
@pytest.mark.parametrize("pages", [8, 11])
def test_whole_blocks_of_a_range_are_copied_in_each_layer(by_block: bool, pages: int):
    source, target = layout(by_block), layout(by_block, pages)
    where = {
        "ours": [5, 2, 7, 1],  # of positions 0, 4, 8, 12
        "theirs": [PageId(6), PageId(3)],  # of positions 4 and 8
        "first": 1,
        "layers": range(3),
        "begin": 5,  # within the block of position 4
        "end": 9,  # within the block of position 8
    }
    pool = copied(source, target, **where)
    expected = np.zeros(target.nbytes, np.uint8)
    for layer in range(3):
        for mine, other in ((2, 6), (7, 3)):
            at = layer * target.layer_stride + other * target.block_stride
            expected[at : at + 16] = 1 + layer * source.pages + mine
    assert (pool == expected).all()


def test_one_layer_leaves_the_others_alone():
    both = layout(True)
    pool = copied(
        both, both, ours=[1], theirs=[PageId(2)], first=0, layers=range(1, 2), begin=0, end=4
    )
    at = both.layer_stride + 2 * both.block_stride
    assert (pool[at : at + 16] == 1 + both.pages + 1).all()
    assert pool.astype(bool).sum() == 16


def test_neighbouring_blocks_are_one_run_where_a_block_has_all_its_layers_together():
    both = layout(True)
    route = BlockRoute(both, both, [PageId(4), PageId(5)], 0)
    ((runs, size),) = route.batches(range(3), [1, 2], 0, 8, 1 << 20)
    assert runs.tolist() == [[both.page_bytes, 4 * both.page_bytes, 2 * both.page_bytes]]
    assert size == 2 * both.page_bytes


def test_batches_have_the_size_that_was_asked_for():
    both = layout(True)
    route = BlockRoute(both, both, [PageId(page) for page in (4, 5, 6)], 0)
    sizes = [size for _, size in route.batches(range(3), [1, 2, 3], 0, 12, 50)]
    assert sum(sizes) == 3 * both.page_bytes
    assert max(sizes) <= 50


def test_an_empty_range_has_no_runs():
    both = layout(True)
    assert not list(BlockRoute(both, both, [PageId(4)], 0).batches(range(3), [1], 2, 2, 50))


def test_pools_of_different_kinds_have_no_route():
    pages = KVLayout(3, 8, 4, 2, 8, torch.float32)
    with pytest.raises(BadAddress, match="different kinds"):
        route_between(pages, layout(True), [PageId(1)], 0)


def test_blocks_cannot_be_split_between_workers():
    with pytest.raises(BadAddress, match="split"):
        layout(True).of_peer([Shard(0, 1, 0, 1)])
    assert layout(True).of_peer(()) == layout(True)

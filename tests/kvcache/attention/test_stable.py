"""Attention against a dense reference, and the identity of its bits.

The identity is what makes the same request give the same tokens under every strategy: a row's
result may depend on nothing but its own query and the keys and values below it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from attention_world import BACKENDS, World, backend

from kvcache.attention.block_tree import BLOCK
from kvcache.attention.tiles import QUERY_TILE
from kvcache.pages.page_pool import SCRATCH_PAGE


@pytest.fixture(autouse=True, params=BACKENDS, scope="module")
def attention(request: pytest.FixtureRequest) -> Iterator[None]:
    with backend(request.param):
        yield


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def close(ours: torch.Tensor, reference: torch.Tensor) -> None:
    torch.testing.assert_close(ours, reference, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("page_size", [1, 4, 16, BLOCK])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (2, 3), (3, 4)])
def test_a_prefill_agrees_with_the_reference(page_size: int, kv_heads: int, group: int):
    world = World([2 * BLOCK + 9], page_size=page_size, kv_heads=kv_heads, group=group)
    (out,) = world.step([(0, 0, 2 * BLOCK + 9)])
    close(out, world.dense(0))


@pytest.mark.parametrize(
    "length",
    [1, 2, 15, 16, 17, QUERY_TILE - 1, QUERY_TILE, QUERY_TILE + 1, BLOCK - 1, BLOCK, BLOCK + 1],
)
def test_every_border_agrees_with_the_reference(length: int):
    world = World([length])
    (out,) = world.step([(0, 0, length)])
    close(out, world.dense(0))


def test_a_mixed_step_agrees_with_the_reference():
    lengths = [300, 1, 129, 70, 33, 200]
    world = World(lengths)
    for index, length in enumerate(lengths[:4]):  # of the decodes all but the last token are cached
        if length > 1:
            world.step([(index, 0, length - 1)])
    world.step([(5, 0, 150)])
    parts = [(4, 0, 33), *((index, lengths[index] - 1, 1) for index in range(4)), (5, 150, 50)]
    for (index, start, count), out in zip(parts, world.step(parts), strict=True):
        close(out, world.dense(index)[start : start + count])


def test_a_decode_of_every_length_agrees_with_the_reference():
    world = World([140])
    out = torch.cat([world.step([(0, position, 1)])[0] for position in range(140)])
    close(out, world.dense(0))


def chunked(world: World, index: int, cuts: Sequence[int]) -> torch.Tensor:
    length = len(world.sequences[index].q)
    borders = [0, *cuts, length]
    steps = pairwise(borders)
    return torch.cat([world.step([(index, a, b - a)])[0] for a, b in steps])


@pytest.mark.usefixtures("threads")
@pytest.mark.slow
def test_bits_do_not_depend_on_the_chunks():
    lengths, rng = [301], random.Random(3)
    whole = chunked(World(lengths), 0, [])
    for cuts in (
        [300],
        [1, 2, 3, 100, 101],
        [128],
        [127, 129],
        [64, 128, 192, 256],
        *(sorted(rng.sample(range(1, 301), 9)) for _ in range(4)),
        range(1, 301),
    ):
        assert torch.equal(chunked(World(lengths), 0, list(cuts)), whole), cuts


@pytest.mark.usefixtures("threads")
def test_bits_do_not_depend_on_the_batch():
    lengths = [190, 7, 129, 333, 64, 250, 2, 140]
    alone, rng = World(lengths), random.Random(4)
    reference = [chunked(alone, index, []) for index in range(len(lengths))]
    world, done = World(lengths), [0] * len(lengths)
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        parts = []
        for index in rng.sample(range(len(lengths)), rng.randint(1, len(lengths))):
            left = lengths[index] - done[index]
            count = min(left, rng.choice([1, 1, 1, 2, 5, 40, 70]))
            if count:
                parts.append((index, done[index], count))
                done[index] += count
        for (index, start, count), out in zip(
            parts, world.step(parts) if parts else [], strict=True
        ):
            assert torch.equal(out, reference[index][start : start + count])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("batch", [2, 3, 8, 33])
@pytest.mark.slow
def test_bits_of_a_decode_do_not_depend_on_the_number_of_decodes(batch: int):
    lengths = [(37 * index) % 280 + 2 for index in range(batch)]
    world = World(lengths, kv_heads=3)
    for index, length in enumerate(lengths):
        world.step([(index, 0, length - 1)])
    together = world.step([(index, length - 1, 1) for index, length in enumerate(lengths)])
    for index, (length, out) in enumerate(zip(lengths, together, strict=True)):
        assert torch.equal(world.step([(index, length - 1, 1)])[0], out)


def test_old_contents_of_a_reused_page_never_show():
    """Unwritten slots are NaN in `World`; here they are also infinite, up to the next position."""
    world = World([100, 40])
    clean = world.step([(0, 0, 90)])[0], world.step([(0, 90, 1)])[0]
    for garbage in (torch.inf, -torch.inf, torch.nan, 3.4e38):
        other = World([100, 40])
        other.pool[1:] = garbage
        assert torch.equal(other.step([(0, 0, 90)])[0], clean[0])
        assert torch.equal(other.step([(1, 0, 3), (0, 90, 1)])[1], clean[1])


def test_the_scratch_page_is_only_read():
    world = World([5])
    world.step([(0, 0, 5)])
    assert not world.pool[SCRATCH_PAGE].count_nonzero()

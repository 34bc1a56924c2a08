"""One bookkeeping may drive several page stores, and it does not import torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from kv_helpers import DIM, HEADS, KV_HEADS, SIZE, Clock

from kvcache.bookkeeping import Bookkeeping
from kvcache.cache import KVCache
from kvcache.errors import BadRequest, Internal
from kvcache.lease.identity import Identity
from kvcache.memory.layout import KVLayout
from kvcache.memory.region import LocalRegion
from kvcache.page_store.base import PageStore
from kvcache.page_store.sharded import ShardedPageStore
from kvcache.page_store.torch_store import TorchPageStore
from kvcache.sequences.step import PageCopy, StepDescription
from kvcache.shard import Shard, split
from kvcache.transport import MemoryNetwork, MemoryTransport
from kvcache.types import EngineId, SeqId

LAYERS, PAGES = 4, 40
ONE, TWO, THREE = SeqId(1), SeqId(2), SeqId(3)
SPLITS = [(2, 1), (1, 2), (2, 2), (4, 1)]  # stages, tensor parallel workers
WHO = Identity(EngineId("a"), 1, b"secret", "same")


def store(shard: Shard | None = None) -> TorchPageStore:
    layout = KVLayout(LAYERS, PAGES + 1, SIZE, KV_HEADS, DIM, torch.float32, shard)
    return TorchPageStore(LocalRegion(layout), query_heads=HEADS)


def bookkeeping(of: PageStore) -> Bookkeeping:
    return Bookkeeping(PAGES + 1, SIZE, slots=of.slots, endpoint=str, identity=WHO, clock=Clock())


class Model:
    """Queries, keys and values that depend on the layers before, as a real model's do."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(7)

    def run(self, attention: PageStore | KVCache, rows: int) -> list[torch.Tensor]:
        """Return each layer's attention output for `rows` new tokens."""
        found, hidden = [], torch.zeros(rows, HEADS, DIM)
        for layer in range(LAYERS):
            q, k, v = (
                torch.randn(rows, heads, DIM, generator=self._generator)
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            )
            found.append(attention.attention(layer, q + hidden, k, v))
            hidden = found[-1]
        return found


def history(books: Bookkeeping, execute: StepRunner) -> None:
    """Prefills, a fork in the middle of a page, decodes, and a prompt that the cache knows."""
    sequences = books.sequences
    prompt = list(range(22))
    sequences.add_sequence(ONE, prompt)
    step(books, execute, [ONE], [9])
    step(books, execute, [ONE], [13])
    sequences.publish(ONE, prompt)
    sequences.fork_sequence(ONE, TWO, 18)
    assert sequences.add_sequence(THREE, [*prompt[:20], 5, 5]) == 20
    step(books, execute, [ONE, TWO, THREE], [1, 3, 2])
    for _ in range(6):
        step(books, execute, [THREE, ONE, TWO], [1, 1, 1])
    for seq_id in (ONE, TWO, THREE):
        sequences.remove_sequence(seq_id)
    books.check()


class StepRunner:
    """Executes step descriptions on one store and keeps the attention outputs."""

    def __init__(self, of: PageStore) -> None:
        self.store, self.model = of, Model()
        self.seen: list[torch.Tensor] = []

    def __call__(self, description: StepDescription) -> None:
        self.store.begin(description)
        rows = sum(span.count for span in description.spans)
        self.seen += self.model.run(self.store, rows)
        self.store.end()


def step(books: Bookkeeping, execute: StepRunner, ids: Sequence[SeqId], counts: list[int]) -> None:
    for seq_id, count in zip(ids, counts, strict=True):
        books.sequences.grow(seq_id, books.sequences.length(seq_id) + count)
    description = books.sequences.begin_step(ids, counts)
    execute(description)
    books.sequences.finish_step(description)


@pytest.mark.parametrize(("pp", "tp"), SPLITS)
def test_several_stores_give_the_bits_of_one(pp: int, tp: int):
    whole = StepRunner(store())
    history(bookkeeping(whole.store), whole)
    shards = [store(shard) for shard in split(LAYERS, KV_HEADS, pp=pp, tp=tp)]
    sharded = StepRunner(ShardedPageStore(shards))
    history(bookkeeping(sharded.store), sharded)
    assert len(whole.seen) == len(sharded.seen) > 0
    for one, several in zip(whole.seen, sharded.seen, strict=True):
        assert torch.equal(one, several)
    sharded.store.check()
    # Every store has its part of the same pages.
    pool = whole.store.pool  # type: ignore[attr-defined]
    for shard in shards:
        held = shard.layout.held
        part = pool[held.layer : held.layer_end, ..., held.head : held.head_end, :]
        assert torch.equal(shard.pool, part)


def test_a_cache_over_several_stores_gives_the_bits_of_one():
    found = []
    for parts in (1, 2):
        shards = split(LAYERS, KV_HEADS, pp=parts, tp=parts)
        of = ShardedPageStore([store(shard) for shard in shards])
        cache = KVCache(of, MemoryTransport(MemoryNetwork(), 1), identity=WHO, clock=Clock())
        model = Model()
        cache.add_sequence(ONE)
        cache.grow(ONE, 10)
        cache.begin_forward([ONE], [7])
        found.append(model.run(cache, 7))
        cache.end_forward()
        cache.fork_sequence(ONE, TWO, 6)  # copies half a page at once
        cache.grow(TWO, 7)
        cache.begin_forward([ONE, TWO], [1, 1])
        found[-1] += model.run(cache, 2)
        cache.end_forward()
        cache.check_integrity()
        cache.close()
    assert all(torch.equal(one, several) for one, several in zip(*found, strict=True))


def test_stores_that_do_not_cover_the_model_are_refused():
    first, *_ = split(LAYERS, KV_HEADS, pp=2, tp=1)
    with pytest.raises(BadRequest, match="layer 2"):
        ShardedPageStore([store(first)])
    with pytest.raises(BadRequest, match="layer 0"):
        ShardedPageStore([store(), store()])


# The description


def test_a_block_table_persists_and_grows_in_place():
    books = bookkeeping(store())
    books.sequences.add_sequence(ONE)
    books.sequences.grow(ONE, SIZE)
    before = books.sequences.begin_step([ONE], [1]).spans[0].pages
    books.sequences.grow(ONE, 5 * SIZE)
    after = books.sequences.begin_step([ONE], [1]).spans[0].pages
    assert before.dtype == after.dtype == np.int32
    assert np.shares_memory(before, after)
    assert len(before) == 1 and len(after) == 5
    assert after.tolist() == books.sequences[ONE].pages


def test_a_described_copy_holds_its_source_until_it_is_done():
    """A store may copy later than the fork, when the parent is gone."""
    books, of = bookkeeping(store()), store()
    run = StepRunner(of)
    books.sequences.add_sequence(ONE)
    step(books, run, [ONE], [6])
    kept = of.pool[:, books.sequences[ONE].pages].clone()
    books.sequences.fork_sequence(ONE, TWO, 6)
    books.sequences.remove_sequence(ONE)
    books.check()
    books.sequences.add_sequence(THREE)
    books.sequences.grow(THREE, SIZE)  # might take the page that the parent had
    books.sequences.grow(TWO, 7)
    description = books.sequences.begin_step([TWO], [1])
    ((source, target, tokens),) = description.copies
    assert tokens == 2 and source not in books.sequences[THREE].pages
    books.check()
    run(description)
    books.sequences.finish_step(description)
    assert torch.equal(of.pool[:, target, :, :2], kept[:, 1, :, :2])
    books.check()
    books.sequences.remove_sequence(TWO)
    books.sequences.remove_sequence(THREE)
    assert books.pages.pool.free == books.pages.total
    books.check()


def test_a_store_without_a_step_raises():
    rows = torch.zeros(1, HEADS, DIM)
    with pytest.raises(Internal, match="begin_forward"):
        store().attention(0, rows, rows[:, :KV_HEADS], rows[:, :KV_HEADS])
    with pytest.raises(Internal, match="begin_forward"):
        store().put(0)
    with pytest.raises(Internal, match="begin_forward"):
        store().end()


BARE = """
import sys
import kvcache.bookkeeping, kvcache.lease.sender, kvcache.sequences.interface
from kvcache.pages.page_manager import PageManager
from kvcache.sequences.interface import SequenceCache
from kvcache.sequences.table import SequenceTable
from kvcache.types import SeqId
cache: SequenceCache = SequenceTable(PageManager(9, 4), 4)
cache.add_sequence(SeqId(1), [1, 2, 3])
cache.grow(SeqId(1), 8)
print(*sorted({"torch", "numba"} & sys.modules.keys()))
"""


@pytest.mark.processes
def test_bookkeeping_works_without_torch():
    done = subprocess.run(
        [sys.executable, "-c", BARE], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == ""


class LaterCopies(TorchPageStore):
    """A store whose copies are complete when the test says so, like those queued on a GPU."""

    complete = False

    def copy(self, copies: Sequence[PageCopy]) -> object:
        super().copy(copies)
        return "event"

    def event_done(self, event: object) -> bool:
        assert event == "event"
        return self.complete


def test_pages_are_not_reused_before_the_device_has_copied_them():
    """A peer does not wait for the device: it would write into the page that is being copied."""
    layout = KVLayout(LAYERS, PAGES + 1, SIZE, KV_HEADS, DIM, torch.float32)
    transport = MemoryTransport(MemoryNetwork(), 1)
    store = LaterCopies.on(transport, layout, query_heads=HEADS)
    cache = KVCache(store, transport, identity=WHO, clock=Clock())
    cache.add_sequence(ONE)
    cache.grow(ONE, SIZE + 1)
    cache.begin_forward([ONE], [SIZE + 1])
    cache.end_forward()
    cache.fork_sequence(ONE, TWO, SIZE + 1)
    cache.remove_sequence(ONE)
    cache.remove_sequence(TWO)
    assert cache.page_use().active == 2  # the source and the target
    cache.check_integrity()
    store.complete = True
    cache.sweep()
    assert cache.page_use().free == PAGES
    cache.check_integrity()
    cache.close()

"""A cache that borrows from one creditor, both in this process, over memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from kv_helpers import HEADS, SIZE, memory_cache, sequence

from kvcache.attention import BLOCK
from kvcache.borrowing import Borrowing
from kvcache.cache import KVCache
from kvcache.errors import MicroserveError
from kvcache.lease import KVAddress
from kvcache.lending import BorrowedBlock
from kvcache.remote_attention import AttentionShape, RemoteAttention
from kvcache.transport import MemoryNetwork
from kvcache.types import EngineId, LeaseId, SeqId

PER_BLOCK = BLOCK // SIZE
PAGES = 4 * PER_BLOCK
TOKENS = [(7 * i) % 400 for i in range(3 * BLOCK + 10)]


Done = Callable[[BaseException | None], object]


class OneCreditor:
    """A `BlockSource` that lends each block as a loan of its own."""

    def __init__(self, creditor: KVCache) -> None:
        self.on_ready: Callable[[], object] = lambda: None
        self.on_lost: Callable[[EngineId, Sequence[LeaseId]], object] = lambda *_: None
        self.on_called_back: Callable[[EngineId, Sequence[LeaseId]], object] = lambda *_: None
        self.creditor = creditor
        self.loans = 0
        self.out: list[BorrowedBlock] = []
        self.failures: list[EngineId] = []
        self.asked_home: list[tuple[BorrowedBlock, str, Done]] = []

    def want(self, blocks: int) -> None:
        pass

    def take(self) -> BorrowedBlock | None:
        self.loans += 1
        loan, pages = LeaseId(str(self.loans)), PER_BLOCK
        with self.creditor.lock:
            address = self.creditor.bookkeeping.lend(EngineId("a"), 1, loan, pages, at=1)
        if address is False:
            return None
        own = tuple(KVAddress.verify(address, b"secret").pages())
        self.out.append(BorrowedBlock(EngineId("b"), 1, loan, address, 0, own))
        return self.out[-1]

    def give_back(self, block: BorrowedBlock, *, at_once: bool = False) -> None:
        self.out.remove(block)
        self.end(block)

    def send_home(self, block: BorrowedBlock, kv_addr: str, done: Done) -> None:
        self.asked_home.append((block, kv_addr, done))

    def answer(self, place: int = 0) -> None:
        """Send a block that was asked home, and say so."""
        block, kv_addr, done = self.asked_home.pop(place)
        failure = None
        try:
            target = self.creditor.page_sends.open(kv_addr)
            with self.creditor.lock:
                sent = self.creditor.page_sends.send(target, block.pages)
            sent.result(10)
        except MicroserveError as error:
            failure = error
        done(failure)

    def failed(self, creditor: EngineId) -> None:
        self.failures.append(creditor)

    def end(self, block: BorrowedBlock) -> None:
        """End a loan. It may have ended already."""
        with self.creditor.lock:
            self.creditor.bookkeeping.take_back(EngineId("a"), 1, block.loan, at=1)


class Scene:
    def __init__(self) -> None:
        network = MemoryNetwork()
        self.now = 100.0  # seconds, by the clock of the cache
        self.cache = memory_cache(network, PAGES, name="a", clock=lambda: self.now)
        self.creditor = memory_cache(network, 6 * PER_BLOCK, name="b", lend_pages=6 * PER_BLOCK)
        self.source = OneCreditor(self.creditor)
        shape = AttentionShape.of(self.cache.layout, HEADS)
        self.remote = RemoteAttention(self.cache.identity, shape)
        self.cache.borrow(self.source, self.remote)

    def close(self) -> None:
        """Check that all pages are accounted for when no block is on its way, and close both."""
        self.arrive()
        self.cache.check_integrity()
        self.creditor.check_integrity()
        assert len(self.source.out) == self.creditor.bookkeeping.lender.lent // PER_BLOCK
        self.cache.close()
        self.creditor.close()

    @property
    def elsewhere(self) -> Borrowing:
        assert self.cache.elsewhere is not None
        return self.cache.elsewhere

    def long(self, number: int = 1) -> SeqId:
        return sequence(self.cache, number, TOKENS)

    def arrive(self) -> int:
        """Wait until no block is on its way; return how many have arrived."""
        arrived, until = 0, time.monotonic() + 10
        while list(self.elsewhere.holders()):
            assert time.monotonic() < until
            arrived += self.elsewhere.settle()
            time.sleep(0.0005)
        return arrived

    def move(self, seq_id: SeqId, blocks: int = 1) -> None:
        for _ in range(blocks):
            assert self.elsewhere.move_oldest(seq_id, TOKENS)
        assert self.arrive() == blocks

    def content(self, block: BorrowedBlock, layer: int) -> torch.Tensor:
        pool: Any = self.creditor.store
        found: torch.Tensor = pool.pool[layer, list(block.pages)].transpose(1, 2).flatten(0, 1)
        return found

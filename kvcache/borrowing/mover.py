"""Puts of blocks into borrowed pages, off the thread that steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

import numpy as np

from kvcache.errors import Internal, MicroserveError
from kvcache.lease import Put
from kvcache.lending import BorrowedBlock
from kvcache.types import PageId, TokenPos

__all__ = ["BlockMover", "Landed"]

log = logging.getLogger(__name__)

KEPT = 64  # puts, the latest used

# Called when no write of a block is in flight any more, with the failure if there is one.
Landed = Callable[[BaseException | None], object]


class BlockMover:
    """Puts full local blocks into borrowed ones.

    A loan is one lease to a put: its positions count from 0 in the pages of the loan. The mover
    claims each loan's address once, which may wait for the creditor, and so has a thread. It never
    raises the watermark, so an address can be claimed again from position 0.
    """

    def __init__(
        self,
        claim: Callable[[str], Put],
        layers: int,
        page_size: int,
        executor: Executor | None = None,
    ) -> None:
        """`claim` returns a put from position 0 of an address on; it may block.

        The pool has `layers`, and `page_size` tokens per page. `executor` runs one move after the
        other; by default a thread does.
        """
        self._claim = claim
        self._layers = range(layers)
        self._page_size = page_size
        self._puts: dict[str, Put] = {}  # by address; belongs to the executor
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="block-mover")

    def move(self, pages: Sequence[PageId], block: BorrowedBlock, landed: Landed) -> None:
        """Put the contents of `pages`, which hold a full block, into a borrowed one.

        The caller holds the pages until `landed`, which is called on any thread.
        """
        try:
            self._executor.submit(self._move, list(pages), block, landed)
        except RuntimeError:
            landed(Internal("the mover is closed"))

    def close(self) -> None:
        """Begin no further moves. Call it before the transport is closed."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _move(self, pages: list[PageId], block: BorrowedBlock, landed: Landed) -> None:
        try:
            put = self._put(block.address)
            end = block.first + len(pages)
            table = np.zeros(end, dtype=np.int32)
            table[block.first :] = pages
            begin = TokenPos(block.first * self._page_size)
            put.write(self._layers, table, begin, TokenPos(end * self._page_size))
            put.close().add_done_callback(lambda done: landed(done.exception()))
        except MicroserveError as error:
            landed(error)
        except Exception as error:
            log.exception("a block cannot be moved")
            landed(error)

    def _put(self, address: str) -> Put:
        """Return the put into a loan's pages."""
        put = self._puts.pop(address, None)
        if put is None or put.failed:
            put = self._claim(address)
        self._puts[address] = put
        if len(self._puts) > KEPT:
            self._puts.pop(next(iter(self._puts))).close()
        return put

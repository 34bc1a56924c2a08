"""Puts into memory that is mapped here: what the `memory` and `shm` transports have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from kvcache.address import KVAddress
from kvcache.region import Region
from kvcache.transport.copy import copy_span
from kvcache.transport.put import QueuedPut
from kvcache.types import PageId

__all__ = ["MappedTarget", "copy_span", "open_mapped"]


class MappedTarget:
    """A `Target` in this process's address space."""

    def __init__(self, source: torch.Tensor, region: Region) -> None:
        self._source = source  # KVLayout.shape, ours
        self._region = region

    def try_right(self, slot: int) -> bool:
        return self._region.try_right(slot)

    def drop_right(self, slot: int) -> None:
        self._region.drop_right(slot)

    def words(self, slot: int) -> npt.NDArray[np.uint64]:
        words: npt.NDArray[np.uint64] = self._region.slots[slot]
        return words

    def store(self, slot: int, words: Mapping[int, int]) -> None:
        for word, value in words.items():
            self._region.slots[slot, word] = value

    def copy(
        self,
        layer: int,
        source_pages: Sequence[PageId],
        target_pages: Sequence[PageId],
        target_first: int,
        begin: int,
        end: int,
    ) -> int:
        return copy_span(
            self._source[layer],
            source_pages,
            self._region.pool[layer],
            target_pages,
            target_first,
            begin,
            end,
        )


def open_mapped(
    source: torch.Tensor,
    region: Region,
    address: KVAddress,
    begin: int,
    worker: ThreadPoolExecutor,
) -> QueuedPut:
    """Claim a lease in a mapped region; `source` is our pool. Raises as `QueuedPut.take_claim`."""
    put = QueuedPut(MappedTarget(source, region), address, source.shape[3], worker)
    put.take_claim(begin)
    return put

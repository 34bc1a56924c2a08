"""Where pages are copied from and to: the device's pool, and memory of the host.

A page has one shape wherever it lies outside of the pool: bytes `[layers, bytes of a page in one
layer]`, contiguous, as it is in the pool.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvcache.memory.layout import KVLayout
from kvcache.tiers.ledger import Found
from kvcache.types import PageId

__all__ = ["DevicePages", "HostStore", "TierStore", "page_shape"]


def page_shape(layout: KVLayout) -> tuple[int, int]:
    """`(layers, bytes)` of one page outside of the pool."""
    return layout.held.layers, layout.page_size * layout.token_bytes


class TierStore(Protocol):
    """Room for `slots` pages, numbered from 1. One thread uses it, but for `fetch` by a reader."""

    name: str
    slots: int

    @property
    def kept(self) -> bool:
        """Whether what is in it outlives the process."""
        ...

    def found(self) -> list[Found]:
        """What an earlier process has left in it; asked for once, first. Raises `OSError`."""
        ...

    def buffer(self, slot: PageId) -> torch.Tensor:
        """Memory to fill with what `slot` shall hold, `page_shape`; `flush` is next."""
        ...

    def flush(self, slot: PageId, prefix: npt.NDArray[np.int32] | None = None) -> None:
        """Keep what the buffer of `slot` was filled with: the last page of `prefix`, which may be
        found again, or, without one, a page of a sequence that ends with us. Raises `OSError`."""
        ...

    def fetch(self, slot: PageId) -> torch.Tensor:
        """What `slot` holds, `page_shape`, until the next call. Raises `OSError`, as for a page
        that is not what was written."""
        ...

    def close(self) -> None:
        """Let go of the room."""
        ...


class HostStore:
    """Host memory, `[slots, layers, 2, page_size, kv_heads, head_dim]` as bytes; a slot is
    contiguous. The kernel gives memory to slots when they are first used."""

    name = "host"
    kept = False

    def __init__(self, layout: KVLayout, slots: int, *, pinned: bool = False) -> None:
        """`pinned` for copies to and from a GPU; it takes the memory at once."""
        self.slots = slots
        self._memory = torch.empty(
            (slots, *page_shape(layout)), dtype=torch.uint8, pin_memory=pinned
        )

    def found(self) -> list[Found]:
        return []

    def buffer(self, slot: PageId) -> torch.Tensor:
        return self._memory[slot - 1]

    def flush(self, slot: PageId, prefix: npt.NDArray[np.int32] | None = None) -> None:
        pass

    def fetch(self, slot: PageId) -> torch.Tensor:
        return self._memory[slot - 1]

    def close(self) -> None:
        pass


class DevicePages:
    """The pool's pages, for the copies of one thread. It does not know who holds which."""

    def __init__(self, pool: torch.Tensor) -> None:
        """`pool` is `KVLayout.shape`, on any device."""
        self._pool = pool.flatten(2).view(torch.uint8)  # [layers, pages, bytes]
        self._stream = _stream(pool.device) if pool.is_cuda else None

    def read(self, page: PageId, out: torch.Tensor) -> None:
        """Copy a page into `out`, `page_shape`, which is complete on return."""
        self._copy(out, self._pool[:, page])

    def write(self, page: PageId, data: torch.Tensor) -> None:
        """Copy `data`, `page_shape`, into a page, which is complete on return."""
        self._copy(self._pool[:, page], data)

    def _copy(self, to: torch.Tensor, data: torch.Tensor) -> None:
        if self._stream is None:
            # NumPy's copy takes this thread only; torch's would wake the step's threads for it.
            np.copyto(to.numpy(), data.numpy())
            return
        with torch.cuda.stream(self._stream):
            # Kernels that wrote the page, or that read what was there before, come first.
            self._stream.wait_stream(torch.cuda.default_stream(self._pool.device))
            to.copy_(data, non_blocking=True)
            self._stream.synchronize()


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

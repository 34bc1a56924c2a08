"""Sources and targets of page copies: the device's pool and host memory.

Outside the pool, every page is a contiguous array of bytes `[layers, bytes of a page in one
layer]`, in the same order as in the pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvcache.memory import KVLayout, SplitLayout
from kvcache.tiers.ledger import StoredPrefix
from kvcache.types import PageId

__all__ = ["DevicePages", "HostStore", "SplitPages", "TierStore", "page_shape"]


def page_shape(layout: KVLayout) -> tuple[int, int]:
    """Return the shape `(layers, bytes)` of one page outside the pool."""
    return layout.held.layers, layout.page_size * layout.token_bytes


class TierStore(Protocol):
    """Storage for `slots` pages, numbered from 1. One thread uses it, except for `fetch`, which the
    thread of the tier below may call too."""

    name: str
    slots: int

    @property
    def persistent(self) -> bool:
        """Whether the contents survive the process."""
        ...

    def load_prefixes(self) -> list[StoredPrefix]:
        """Return the prefixes of an earlier process. Called once, first. Raises: `OSError`."""
        ...

    def buffer(self, slot: PageId) -> torch.Tensor:
        """Return memory of `page_shape` to fill with the page of `slot`; then call `flush`."""
        ...

    def flush(self, slot: PageId, prefix: npt.NDArray[np.int32] | None = None) -> None:
        """Store the contents of the buffer in `slot`.

        With `prefix`, they are its last page, which a later process may find. Without, they are a
        page of a swapped sequence, which ends with this process. Raises: `OSError`.
        """
        ...

    def fetch(self, slot: PageId) -> torch.Tensor:
        """Return the page in `slot`, `page_shape`, valid until the next call.

        Raises: `OSError`, also for a page that does not match its checksum.
        """
        ...

    def close(self) -> None:
        """Release the storage."""
        ...


class HostStore:
    """A `TierStore` in host memory: `[slots, layers, 2, page_size, kv_heads, head_dim]` as bytes.

    A slot is contiguous. The operating system allocates its memory at the first use.
    """

    name = "host"
    persistent = False

    def __init__(self, layout: KVLayout, slots: int, *, pinned: bool = False) -> None:
        """Pinned memory, for copies to and from a GPU, is allocated at once."""
        self.slots = slots
        self._memory = torch.empty(
            (slots, *page_shape(layout)), dtype=torch.uint8, pin_memory=pinned
        )

    def load_prefixes(self) -> list[StoredPrefix]:
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
    """The pool's pages, copied by one thread."""

    def __init__(self, pool: torch.Tensor) -> None:
        """`pool` is `KVLayout.shape`, on any device."""
        self._pool = pool.flatten(2).view(torch.uint8)  # [layers, pages, bytes]
        self._stream = _stream(pool.device) if pool.is_cuda else None

    def read(self, page: PageId, out: torch.Tensor) -> None:
        """Copy a page into `out`, `page_shape`; return when the copy is complete."""
        self._copy(out, self._pool[:, page])

    def write(self, page: PageId, data: torch.Tensor) -> None:
        """Copy `data`, `page_shape`, into a page; return when the copy is complete."""
        self._copy(self._pool[:, page], data)

    def _copy(self, to: torch.Tensor, data: torch.Tensor) -> None:
        if self._stream is None:
            # NumPy copies on this thread; torch would wake the threads that compute steps.
            np.copyto(to.numpy(), data.numpy())
            return
        with torch.cuda.stream(self._stream):
            # Wait for kernels that write the page, or that read its previous contents.
            self._stream.wait_stream(torch.cuda.default_stream(self._pool.device))
            to.copy_(data, non_blocking=True)
            self._stream.synchronize()


class SplitPages(DevicePages):
    """The pages of a pool whose parts several workers compute, copied by one thread."""

    def __init__(self, pool: torch.Tensor, layout: SplitLayout) -> None:
        """`pool` is in host memory."""
        self._whole = layout.whole
        self._parts = [
            (part.held, view.view(torch.uint8))
            for (_, part), view in zip(layout.parts, layout.views(pool), strict=True)
        ]

    def read(self, page: PageId, out: torch.Tensor) -> None:
        for to, part in self._places(out):
            np.copyto(to.numpy(), part[:, page].numpy())

    def write(self, page: PageId, data: torch.Tensor) -> None:
        for place, part in self._places(data):
            np.copyto(part[:, page].numpy(), place.numpy())

    def _places(self, page: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each part's place in a page outside the pool, and that part of the pool."""
        whole = self._whole
        shape = (whole.layers, 2, whole.page_size, whole.kv_heads, whole.head_bytes)
        model = page.view(shape)
        for held, part in self._parts:
            layers, heads = (slice(held.layer, held.layer_end), slice(held.head, held.head_end))
            yield model[layers, :, :, heads], part


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

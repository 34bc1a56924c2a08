"""The interface of a page store: pages of KV on one device, and the execution of steps on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kvcache.lease import ControlSlots, Put
from kvcache.memory import KVLayout
from kvcache.remote_attention import RemoteAttention
from kvcache.sequences import PageCopy, PageIds, StepDescription
from kvcache.shard import Shard
from kvcache.tiers import DevicePages
from kvcache.types import TokenPos

__all__ = ["PageStore"]


class PageStore(Protocol):
    """Owns the memory of pages and executes the descriptions of bookkeeping. It decides nothing.

    One bookkeeping may drive several stores, each with some of the layers or KV heads. All of them
    execute the same descriptions. One step is under way at a time. `attention` and `put` run
    without the cache's lock.
    """

    @property
    def layout(self) -> KVLayout:
        """The shape of the pages."""
        ...

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The parts of the model in the pool that peers write into: see `PoolLayout.shards`."""
        ...

    @property
    def device(self) -> torch.device:
        """Where `attention` takes and returns tensors."""
        ...

    @property
    def slots(self) -> ControlSlots:
        """The control slots of receive leases on these pages."""
        ...

    def borrow(self, remote: RemoteAttention) -> None:
        """Attend to blocks that lie with creditors through `remote`, which the caller owns.

        Raises `Unsupported` if the store cannot do that.
        """
        ...

    def device_pages(self) -> DevicePages:
        """Return access to whole pages for one thread, for example the thread of a tier."""
        ...

    def add_put(self, put: Put) -> None:
        """Let later descriptions name a put by its claim."""
        ...

    def remove_put(self, claim: int) -> None:
        """Forget a put. Idempotent."""
        ...

    def copy(self, copies: Sequence[PageCopy]) -> object:
        """Copy parts of pages; later work on the store's device sees the result.

        Return None if the copies are complete. If the device executes them later, return an event
        for `event_done`; the pages must not be reused before.
        """
        ...

    def event_done(self, event: object) -> bool:
        """Return whether the copies before `event` are complete; never wait for them."""
        ...

    def send(self, claim: int, pages: PageIds, begin: TokenPos, end: TokenPos) -> None:
        """Send positions `[begin, end)`, which are present, in all layers; then signal `end`."""
        ...

    def begin(self, step: StepDescription) -> None:
        """Start a step: its copies first. Replaces a step that was not ended."""
        ...

    def attention(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Append the rows' keys and values to a layer of the model, send them, and attend.

        Shapes are those of `KVCache.attention`. Raises `Internal` without a step.
        """
        ...

    def put(self, layer: int) -> None:
        """Send the step's rows of one layer of the model, as they are in the pages now.

        Raises `Internal` without a step.
        """
        ...

    def end(self) -> None:
        """End the step, and signal what was sent."""
        ...

    def abort(self) -> None:
        """Forget the step; nothing is signalled."""
        ...

    def check(self) -> None:
        """Raise `Internal` if the scratch page has been written."""
        ...

    def close(self) -> None:
        """Release the memory, after the transport is closed."""
        ...

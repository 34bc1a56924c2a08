"""The page store of an engine of many workers, as its lead sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.workers.group import WorkerGroup
from engine.workers.wire import Kind
from kvcache.errors import Internal
from kvcache.lease import ControlSlots, Put
from kvcache.memory import KVLayout
from kvcache.sequences import PageCopy, PageIds, StepDescription
from kvcache.tiers import DevicePages
from kvcache.transport import Transport
from kvcache.types import TokenPos

__all__ = ["WorkerStore"]


class WorkerStore:
    """A `PageStore` whose pages are in the workers, which it ends. The lead has the control slots.

    Steps come to them from `engine.workers.runner`.
    """

    def __init__(self, group: WorkerGroup, transport: Transport, layout: KVLayout) -> None:
        """Allocate the pages of `layout`, that of the whole model. Raises `Internal`."""
        self.layout = layout
        self.group = group
        self._region = transport.allocate(replace(layout, pages=1))
        transport.register(self._region)
        group.ask(Kind.ALLOCATE, [[layout.pages]])

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def slots(self) -> ControlSlots:
        return self._region

    def device_pages(self) -> DevicePages:
        raise Internal("tiers need one pool")

    def add_put(self, put: Put) -> None:
        raise Internal("nothing is sent from several workers")

    def remove_put(self, claim: int) -> None:
        pass

    def send(self, claim: int, pages: PageIds, begin: TokenPos, end: TokenPos) -> None:
        raise Internal("nothing is sent from several workers")

    def copy(self, copies: Sequence[PageCopy]) -> object:
        return self.group.tell(Kind.COPY, [np.array(copies, dtype=np.int64)])

    def event_done(self, event: object) -> bool:
        return not isinstance(event, int) or self.group.answered(event)

    def begin(self, step: StepDescription) -> None:
        pass

    def attention(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        raise Internal("the lead computes no attention")

    def put(self, layer: int) -> None:
        raise Internal("nothing is sent from several workers")

    def end(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def check(self) -> None:
        self.group.ask(Kind.CHECK)

    def close(self) -> None:
        self.group.close()
        self._region.close()

"""The page store of an engine of many workers, as its lead sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from engine.workers.group import WorkerGroup
from kvcache.errors import Internal, Unsupported
from kvcache.lease import ControlSlots, Put
from kvcache.memory import KVLayout, SplitLayout
from kvcache.pages import SCRATCH_PAGE
from kvcache.remote_attention import RemoteAttention
from kvcache.sequences import PageCopy, PageIds, StepDescription
from kvcache.shard import Shard
from kvcache.tiers import DevicePages, SplitPages
from kvcache.transport import Transport
from kvcache.types import TokenPos

__all__ = ["WorkerStore"]


class WorkerStore:
    """A `PageStore` whose steps the workers compute, and which this process owns.

    The lead has allocated all pages and maps them, and each worker maps its part. So the lead
    copies, sends and checks pages without asking a worker, peers write them as they write any pool,
    and a worker that dies takes no KV with it. Steps come to the workers from
    `engine.workers.runner`. What a step sends goes out when it has ended, all its layers at once.
    """

    def __init__(self, group: WorkerGroup, transport: Transport, layout: KVLayout) -> None:
        """Allocate the pages of `layout`, that of the whole model, and register them.

        Raises `Internal`, and as `Transport.register`.
        """
        self.layout = layout
        self.group = group
        self._split = SplitLayout(layout, group.shards)
        self._region = transport.allocate(self._split)
        transport.register(self._region)
        self._parts = self._split.views(self._region.pool)
        self._layers = range(layout.layers)
        self._puts: dict[int, Put] = {}  # by claim
        self._steps: deque[StepDescription] = deque()  # begun, oldest first
        group.map_pages(layout.pages, *self._region.pool_fd)

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self._split.shards

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def slots(self) -> ControlSlots:
        return self._region

    def borrow(self, remote: RemoteAttention) -> None:
        raise Unsupported("an engine of workers cannot borrow")

    def device_pages(self) -> DevicePages:
        return SplitPages(self._region.pool, self._split)

    def add_put(self, put: Put) -> None:
        self._puts[put.claim] = put

    def remove_put(self, claim: int) -> None:
        self._puts.pop(claim, None)

    def send(self, claim: int, pages: PageIds, begin: TokenPos, end: TokenPos) -> None:
        put = self._puts[claim]
        put.write(self._layers, pages, begin, end)
        put.signal(end)

    def copy(self, copies: Sequence[PageCopy]) -> object:
        """Implement `PageStore.copy`: at once, for no step under way writes either page."""
        for source, target, tokens in copies:
            for part in self._parts:
                part[:, target, :, :tokens] = part[:, source, :, :tokens]
        return None

    def event_done(self, event: object) -> bool:
        return True

    def begin(self, step: StepDescription) -> None:
        self.copy(step.copies)
        self._steps.append(step)

    def attention(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        raise Internal("the lead computes no attention")

    def put(self, layer: int) -> None:
        raise Internal("the lead sends what a step computed when it ends")

    def end(self) -> None:
        if not self._steps:
            raise Internal("end_forward without begin_forward")
        step = self._steps.popleft()
        for send in step.sends:
            put = self._puts.get(send.claim)
            if put is None:
                continue
            if send.begin < send.end:
                put.write(self._layers, step.spans[send.span].pages, send.begin, send.end)
            put.signal(send.landed)

    def abort(self) -> None:
        if self._steps:
            self._steps.popleft()

    def check(self) -> None:
        if any(bool(part[:, SCRATCH_PAGE].count_nonzero()) for part in self._parts):
            raise Internal("the scratch page has been written")

    def close(self) -> None:
        self.group.close()
        self._region.close()

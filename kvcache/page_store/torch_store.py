"""Pages in a torch tensor, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kvcache.attention import (
    BLOCK,
    DecodePlan,
    DecodePlans,
    FlashInfer,
    Plan,
    Planner,
    held_planner_for,
    planner_for,
)
from kvcache.errors import BadRequest, Internal
from kvcache.lease import ControlSlots, Put
from kvcache.memory import KVLayout, Region
from kvcache.page_store.away_spans import AwaySpans
from kvcache.pages import SCRATCH_PAGE
from kvcache.remote_attention import DistributedPlan, RemoteAttention
from kvcache.sequences import PageCopy, PageIds, StepDescription
from kvcache.shard import Shard
from kvcache.tiers import DevicePages
from kvcache.transport import Transport
from kvcache.types import TokenPos

__all__ = ["TorchPageStore"]


class TorchPageStore:
    """A `PageStore` over one region of memory, which it owns."""

    def __init__(self, region: Region, *, query_heads: int) -> None:
        """`query_heads` and `region.layout.kv_heads` count the heads of the whole model.

        Raises `BadRequest` for a page size that does not divide the attention block.
        """
        layout = region.layout
        if not isinstance(layout, KVLayout):
            raise Internal("a page store needs to know where heads and tokens are")
        if BLOCK % layout.page_size:
            raise BadRequest(f"page size {layout.page_size} does not divide {BLOCK}")
        self.layout = layout
        self.pool = region.pool
        self._group = query_heads // layout.kv_heads
        self.planner: Planner = planner_for(layout, self._group, self.pool.device)
        self._region = region
        self._first_layer = layout.held.layer
        self._puts: dict[int, Put] = {}  # by claim
        self._step: StepDescription | None = None
        # Of the step; made by its first `attention`.
        self._plan: Plan | DistributedPlan | None = None
        self._remote: RemoteAttention | None = None
        self._away = AwaySpans()

    @classmethod
    def on(cls, transport: Transport, layout: KVLayout, *, query_heads: int) -> TorchPageStore:
        """Allocate memory that peers can reach through `transport`, and register it there.

        Raises as the constructor and as `Transport.register`.
        """
        store = cls(transport.allocate(layout), query_heads=query_heads)
        store.register(transport)
        return store

    def register(self, transport: Transport) -> None:
        """Make the memory reachable through a transport. Raises as `Transport.register`."""
        transport.register(self._region)

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.layout.shards

    @property
    def device(self) -> torch.device:
        return self.pool.device

    @property
    def slots(self) -> ControlSlots:
        return self._region

    def borrow(self, remote: RemoteAttention) -> None:
        self._remote = remote
        self._held_planner = held_planner_for(self.layout, self._group, self.pool.device)

    def decode_plans(self, rows: int, tokens: int) -> DecodePlans | None:
        """Return plans of decodes for CUDA graphs; None where the pool's attention has none.

        They are for up to `rows` rows, of contexts of up to `tokens` tokens.
        """
        if self.pool.is_cuda and isinstance(self.planner, FlashInfer):
            return self.planner.decode_plans(rows, tokens)
        return None

    @contextmanager
    def using(self, plan: DecodePlan) -> Iterator[None]:
        """Have `attention` use `plan`, outside of a step, while a graph is captured."""
        self._step, self._plan = StepDescription((), ()), plan
        try:
            yield
        finally:
            self._step = self._plan = None

    def device_pages(self) -> DevicePages:
        return DevicePages(self.pool)

    def add_put(self, put: Put) -> None:
        self._puts[put.claim] = put

    def remove_put(self, claim: int) -> None:
        self._puts.pop(claim, None)

    def copy(self, copies: Sequence[PageCopy]) -> object:
        for source, target, tokens in copies:
            self.pool[:, target, :, :tokens] = self.pool[:, source, :, :tokens]
        if not self.pool.is_cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.pool.device))
        return event

    def event_done(self, event: object) -> bool:
        if not isinstance(event, torch.cuda.Event):
            return True
        done: bool = event.query()  # type: ignore[no-untyped-call]
        return done

    def send(self, claim: int, pages: PageIds, begin: TokenPos, end: TokenPos) -> None:
        put = self._puts[claim]
        put.write(range(self.layout.held.layers), pages, begin, end)
        put.signal(end)

    def begin(self, step: StepDescription) -> None:
        self.copy(step.copies)
        self._step, self._plan = step, None

    def attention(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        if self._step is None:
            raise Internal("attention without begin_forward")
        if self._plan is None:
            self._plan = self._make_plan(self._step)
        pages = self.pool[layer - self._first_layer]
        self._plan.append(pages, k, v)
        if self._step.sends:
            self.put(layer)
        if isinstance(self._plan, DistributedPlan):
            return self._plan.attend(layer, pages, q)
        return self._plan.attend(pages, q)

    def put(self, layer: int) -> None:
        step = self._step
        if step is None:
            raise Internal("put without begin_forward")
        local = layer - self._first_layer
        for send in step.sends:
            put = self._puts.get(send.claim)
            if put is not None and send.begin < send.end:
                pages = step.spans[send.span].pages
                put.write(range(local, local + 1), pages, send.begin, send.end)

    def end(self) -> None:
        step, self._step, self._plan = self._step, None, None
        if step is None:
            raise Internal("end_forward without begin_forward")
        for send in step.sends:
            put = self._puts.get(send.claim)
            if put is not None:
                put.signal(send.landed)

    def abort(self) -> None:
        if isinstance(self._plan, DistributedPlan) and self._remote is not None:
            self._remote.abort_step()
        self._step = self._plan = None

    def check(self) -> None:
        if bool(self.pool[:, SCRATCH_PAGE].count_nonzero()):
            raise Internal("the scratch page has been written")

    def _make_plan(self, step: StepDescription) -> Plan | DistributedPlan:
        if self._remote is None or not any(span.away for span in step.spans):
            return self.planner(step.spans)
        return DistributedPlan(
            step.spans,
            self._away.by_creditor(step.spans),
            self._remote,
            planner=self.planner,
            held_planner=self._held_planner,
            page_size=self.layout.page_size,
        )

    def close(self) -> None:
        self._region.close()

"""What the HTTP API needs of an engine, whatever computes behind it."""

from __future__ import annotations

from typing import Protocol

from engine.protocol import (
    EngineState,
    EngineStatistics,
    EngineTimeline,
    Extend,
    ExtendReply,
    MirrorGeneration,
    ModelInfo,
    Pin,
    PrepRecv,
    PrepRecvReply,
    Release,
    RemoteSend,
    RemoteSendReply,
    StartGenerate,
)
from engine.service import (
    Borrowing,
    EngineMetrics,
    EventMuxes,
    GenerationStream,
    HomeOrders,
    Lending,
    PrefixFeed,
)

__all__ = ["ServedEngine"]


class ServedEngine(Protocol):
    """An engine's calls (the microserving paper, Table 1) and reports. Lives on one event loop.

    A call returns, raises an error of the tree in `kvcache.errors`, or is cancelled because its
    caller has gone away. After an error or a cancellation nothing of the call remains. Calls that
    the engine's capabilities leave out raise `Unsupported`.
    """

    @property
    def metrics(self) -> EngineMetrics: ...
    @property
    def muxes(self) -> EventMuxes: ...
    @property
    def prefixes(self) -> PrefixFeed: ...
    @property
    def lending(self) -> Lending | None:
        """Its pages that other engines borrow; None if it cannot lend any."""
        ...

    @property
    def borrowing(self) -> Borrowing | None:
        """The pages that it borrows from other engines; None if it does not borrow."""
        ...

    @property
    def home_orders(self) -> HomeOrders | None:
        """Orders to bring blocks home from its creditors; None if it does not borrow."""
        ...

    async def promote(self, prompt: list[int]) -> None:
        """Bring a prompt's KV back from slower memory; its caller may disconnect meanwhile."""
        ...

    async def prep_recv(self, call: PrepRecv) -> PrepRecvReply: ...
    async def remote_send(self, call: RemoteSend) -> RemoteSendReply: ...

    def may_wait(self, call: StartGenerate) -> bool:
        """Whether `start_generate` may wait, so that its caller may disconnect meanwhile."""
        ...

    async def start_generate(self, call: StartGenerate) -> GenerationStream: ...
    async def mirror(self, call: MirrorGeneration) -> None: ...
    async def extend(self, call: Extend) -> ExtendReply: ...
    async def commit(self, lease_id: str) -> int: ...
    async def pin(self, call: Pin) -> int: ...
    async def unpin(self, call: Pin) -> int: ...

    async def release(self, call: Release) -> None:
        """End a lease or everything under a request id, and wait for the effect, within bounds."""
        ...

    def model_info(self) -> ModelInfo: ...
    def state(self) -> EngineState: ...
    def statistics(self) -> EngineStatistics: ...

    def timeline(self, seconds: float) -> EngineTimeline:
        """Return the steps and puts of the latest `seconds`; with 0, only what its clock says.

        Called on any thread.
        """
        ...

    async def check_integrity(self) -> None:
        """Verify that every page has exactly the owner that the bookkeeping says."""
        ...

    def check_health(self) -> None:
        """Raise `Internal` if the engine makes no progress."""
        ...

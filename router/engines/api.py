"""The calls to an engine, whatever is behind them: a process over HTTP, or a simulation.

Bodies are the messages of `engine.protocol` as plain dicts: the router makes them itself, so they
need no validation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from engine.protocol import (
    EngineState,
    EngineStatistics,
    EngineTimeline,
    LendHomeReply,
    ModelInfo,
    PrefixChange,
    PrepRecvReply,
    RemoteSendReply,
)
from router.base import Chunk

__all__ = ["ChunkStream", "EngineCalls", "Headers"]

Headers = Mapping[str, str]


class ChunkStream(Protocol):
    """One running generation. Must not be shared between tasks."""

    async def next(self) -> Chunk:
        """Return the next chunk.

        Raises the error of an error event, and `EngineUnreachable` if the stream ends early. A
        generation ends with a chunk that has a `finish_reason`; do not call this after it.
        """
        ...

    def progress(self) -> int | None:
        """Return how many events have arrived; None if that is unknown or no more can arrive."""
        ...

    def abort(self, reason: str = ...) -> None:
        """Make a pending or later `next` raise `EngineUnreachable`."""
        ...

    async def finish(self) -> None:
        """Release what the stream holds, after the last chunk."""
        ...


class EngineCalls(Protocol):
    """One engine's calls.

    Every call raises `EngineUnreachable` if the engine cannot be reached or is lost during the
    call, and otherwise the error that the engine names. It may be cancelled at any time.
    """

    url: str

    async def prep_recv(self, body: dict[str, Any], headers: Headers) -> PrepRecvReply: ...
    async def remote_send(self, body: dict[str, Any], headers: Headers) -> RemoteSendReply: ...
    async def start_generate(self, body: dict[str, Any], headers: Headers) -> ChunkStream: ...
    async def mirror(self, body: dict[str, Any], headers: Headers) -> None: ...
    async def commit(self, body: dict[str, Any], headers: Headers) -> None: ...
    async def release(self, body: dict[str, Any], headers: Headers) -> None: ...
    async def pin(self, body: dict[str, Any], headers: Headers) -> int: ...
    async def unpin(self, body: dict[str, Any], headers: Headers) -> int: ...

    async def set_creditors(self, body: dict[str, Any], headers: Headers) -> None:
        """Tell an engine that borrows whom to ask."""
        ...

    async def bring_home(self, body: dict[str, Any], headers: Headers) -> LendHomeReply:
        """Have an engine that borrows bring blocks home; takes up to `freeze_ms` of the body."""
        ...

    def prefixes(self) -> AsyncGenerator[PrefixChange, None]:
        """Yield what the prefix cache holds, and then its changes, without end."""
        ...

    async def model(self) -> ModelInfo: ...
    async def state(self) -> EngineState: ...
    async def statistics(self) -> EngineStatistics: ...

    async def timeline(self, seconds: float) -> EngineTimeline:
        """Return its latest steps and puts; with 0 seconds, only what its clock says."""
        ...

    async def health(self) -> None: ...

    def close(self) -> None:
        """Close what is open for further calls; calls that run may end."""
        ...

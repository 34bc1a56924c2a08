"""An engine as the router calls it, whatever is behind: a process over HTTP, or a simulation.

The bodies are the messages of `engine.protocol` as plain dicts: the router makes them itself.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from engine.protocol import EngineState, ModelInfo, PrefixChange, PrepRecvReply, RemoteSendReply
from router.base.request import Chunk

__all__ = ["ChunkStream", "EngineCalls", "Headers"]

Headers = Mapping[str, str]


class ChunkStream(Protocol):
    """One running generation. Not to be shared between tasks."""

    async def next(self) -> Chunk:
        """The next chunk. Raises what an error event says; `EngineUnreachable` if the stream ends.

        A generation ends with a chunk that has a `finish_reason`; nobody asks for more after it.
        """
        ...

    def abort(self) -> None:
        """A pending or later `next` raises `EngineUnreachable`."""
        ...

    async def finish(self) -> None:
        """After the last chunk: let go of what the stream holds."""
        ...


class EngineCalls(Protocol):
    """Every call raises `EngineUnreachable` where the engine cannot be reached or goes away in
    between, and the error that the engine names otherwise. It may be cancelled at any time."""

    url: str

    async def prep_recv(self, body: dict[str, Any], headers: Headers) -> PrepRecvReply: ...
    async def remote_send(self, body: dict[str, Any], headers: Headers) -> RemoteSendReply: ...
    async def start_generate(self, body: dict[str, Any], headers: Headers) -> ChunkStream: ...
    async def mirror(self, body: dict[str, Any], headers: Headers) -> None: ...
    async def commit(self, body: dict[str, Any], headers: Headers) -> None: ...
    async def release(self, body: dict[str, Any], headers: Headers) -> None: ...
    async def pin(self, body: dict[str, Any], headers: Headers) -> int: ...
    async def unpin(self, body: dict[str, Any], headers: Headers) -> int: ...

    def prefixes(self) -> AsyncGenerator[PrefixChange, None]:
        """What the prefix cache has, and from then on what it gains and loses, for ever."""
        ...

    async def model(self) -> ModelInfo: ...
    async def state(self) -> EngineState: ...
    async def health(self) -> None: ...

"""The lead's side of its calls into vLLM's engine core, and of the notes from there."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import orjson

from engine.protocol import Internal, NoCapacity, error_from_body

__all__ = ["CoreClient", "NoteReader"]

log = logging.getLogger(__name__)

MOST_NOTE = 64 << 20  # bytes of a line; a change of the whole prefix cache is one


class RpcEngine(Protocol):
    """The part of vLLM's `AsyncLLM` that calls go through."""

    def collective_rpc(
        self, method: str, timeout: float | None, args: tuple[Any, ...]
    ) -> Awaitable[list[Any]]: ...


class CoreClient:
    """Calls of `engine.vllm.core.calls`, which run between two steps."""

    def __init__(self, llm: RpcEngine) -> None:
        self._llm = llm

    async def call(self, name: str, **body: Any) -> dict[str, Any]:
        """Make a call and return its reply. Raises the error that the core names, and `Internal`
        if the core has ended.

        A call that is cancelled takes effect all the same.
        """
        try:
            (reply,) = await self._llm.collective_rpc("microserve_call", None, (name, body))
        except Exception as error:  # vLLM's own classes, of a library that need not be there
            raise Internal(f"vLLM's engine core has failed: {error}") from error
        if not isinstance(reply, dict):
            raise Internal(f"{name} has no reply")
        if "error" in reply:
            failure = error_from_body(reply)
            if isinstance(failure, NoCapacity) and reply.get("retry_after_s"):
                failure.retry_after_s = float(reply["retry_after_s"])
            raise failure
        return reply


class NoteReader:
    """Reads the notes of the core from a socket that only this user can reach."""

    def __init__(self) -> None:
        self.path = ""

    @asynccontextmanager
    async def listening(self, on_note: Callable[[dict[str, Any]], None]) -> AsyncIterator[None]:
        """Listen at `path`, and call `on_note` with each note, while the body runs."""

        async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError):
                while line := await reader.readline():
                    try:
                        on_note(orjson.loads(line))
                    except Exception:
                        log.exception("a note from the engine core cannot be read")
            writer.close()

        with tempfile.TemporaryDirectory(prefix="microserve-") as folder:
            self.path = str(Path(folder, "notes"))
            server = await asyncio.start_unix_server(read, self.path, limit=MOST_NOTE)
            try:
                yield
            finally:
                server.close()

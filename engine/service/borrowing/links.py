"""Connections to creditors, which a thread makes because that blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from kvcache.remote_attention import RemoteAttention
from kvcache.types import EngineId

__all__ = ["ThreadedLinks"]


class ThreadedLinks:
    """The `engine.borrowing.Links` of a `RemoteAttention`, for an event loop."""

    def __init__(self, remote: RemoteAttention) -> None:
        self._remote = remote

    def connected(self) -> list[EngineId]:
        """See `Links.connected`."""
        return self._remote.connected()

    async def connect(self, creditor: EngineId, endpoints: Sequence[str], epoch: int) -> None:
        """See `Links.connect`. A connection that is not awaited any more is made nevertheless."""
        await _in_thread(lambda: self._remote.connect(creditor, endpoints, epoch))

    def disconnect(self, creditor: EngineId) -> None:
        """See `Links.disconnect`."""
        self._remote.disconnect(creditor)


def _in_thread(work: Callable[[], None]) -> Awaitable[None]:
    """Run `work` in a daemon thread: the end of the process does not wait for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def finish(error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def run() -> None:
        error = None
        try:
            work()
        except Exception as caught:  # noqa: BLE001  raised in the event loop
            error = caught
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(finish, error)

    threading.Thread(target=run, name="borrowing-connect", daemon=True).start()
    return future

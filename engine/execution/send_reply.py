"""The wait for the end of a send, on an event loop. Imports no torch."""

from __future__ import annotations

import asyncio

from engine.protocol import RemoteSendReply
from engine.scheduling import Send

__all__ = ["reply_of"]


async def reply_of(send: Send) -> RemoteSendReply:
    """Return the reply of a send, or raise its failure. Cancellation does not cancel the send."""
    done = asyncio.wrap_future(send.done)
    done.add_done_callback(_retrieve_exception)
    return await asyncio.shield(done)


def _retrieve_exception(done: asyncio.Future[RemoteSendReply]) -> None:
    """Mark the exception as retrieved, so that asyncio does not log it if no caller is left."""
    if not done.cancelled():
        done.exception()

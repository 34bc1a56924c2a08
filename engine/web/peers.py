"""Calls to other processes of a deployment, whose replies are bounded in bytes and in time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from engine.protocol import PeerUnreachable

if TYPE_CHECKING:
    import httpx

__all__ = ["PeerReply", "call_peer"]

HEADERS = {
    "Content-Type": "application/json",
    "Accept-Encoding": "identity",  # a compressed body may be a thousand times as long
}


class PeerReply(NamedTuple):
    """A whole reply."""

    status: int
    body: bytes


async def call_peer(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    content: bytes = b"",
    *,
    most: int,
    within_s: float,
) -> PeerReply:
    """Send JSON and return the whole reply, whatever its status.

    Raises `PeerUnreachable` if the other process cannot be reached, if its reply is not complete
    within `within_s` seconds, or if the reply has more than `most` bytes. The connection is closed
    then.
    """
    import httpx  # here, because routers import this room and have no use for it

    body = bytearray()
    try:
        async with (
            asyncio.timeout(within_s),
            client.stream(method, url, content=content, headers=HEADERS) as reply,
        ):
            async for piece in reply.aiter_raw():
                body += piece
                if len(body) > most:
                    raise PeerUnreachable(f"a reply of more than {most} bytes")
            return PeerReply(reply.status_code, bytes(body))
    except TimeoutError:
        raise PeerUnreachable(f"no complete reply within {within_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise PeerUnreachable(str(error) or type(error).__name__) from error

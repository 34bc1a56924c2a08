"""The client's connection as handlers see it, its body, and how a refused client is heard out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from engine.protocol import BadRequest, Overloaded, TooLarge

if TYPE_CHECKING:
    from starlette.types import Receive, Scope

__all__ = ["ClientConnection", "check_input", "linger", "read_body"]

# Time for a client that still sends its body to read why it was refused.
LINGER_S = 2.0


class ClientConnection(Protocol):
    """The client's connection, which the server passes as `scope["state"]["connection"]`."""

    @property
    def arrived(self) -> bool:
        """Whether the whole body of the running request has arrived."""

    @property
    def gone(self) -> bool:
        """Whether the client has disconnected."""

    def cancels(self, task: asyncio.Task[Any] | None) -> None:
        """Cancel `task` when the client disconnects, until another call replaces it."""

    def release_body(self) -> None:
        """Count the body of the running request no longer: it has been parsed."""

    def shutdown(self) -> None:
        """Close after the running response; nothing that waits behind it is started."""

    def half_close(self) -> None:
        """Send the end of the stream after what was written, but still receive."""

    def abort(self) -> None:
        """Close at once and discard what the client has not read."""


def check_input(state: Mapping[str, Any]) -> None:
    """Raise what the server found wrong with the bytes of a request; `state` is of its scope.

    `BadRequest` if they are not valid HTTP, `Overloaded` if there is no room for the body.
    """
    if "broken" in state:
        raise BadRequest(state["broken"])
    if "overloaded" in state:
        raise Overloaded("the bodies of other requests leave no room for this one; retry later")


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the body of a request.

    Raises `TooLarge` as soon as it has more than `limit` bytes, `BadRequest` if the client
    disconnects within it, and as `check_input`.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise TooLarge(f"the body has {int(value)} bytes, more than {limit}")
    state = scope.get("state") or {}
    # Growing one buffer instead would leave holes in the heap as large as the bodies.
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        check_input(state)
        if message["type"] != "http.request":
            raise BadRequest("the client disconnected within the body")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise TooLarge(f"the body has more than {limit} bytes")
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def linger(connection: ClientConnection | None, receive: Receive) -> None:
    """Close a connection whose client still sends the body of a request that was answered.

    A client still sending would lose the response to a reset. So its input is discarded until it
    ends, for `LINGER_S` at most.
    """
    if connection is not None:
        connection.half_close()
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body", False):
                pass
    if connection is not None:
        connection.abort()

"""Request handling below the routes: bodies, cancellation, errors, a direct route."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from engine import web
from engine.protocol import BadRequest, MicroserveError, NoCapacity
from engine.web import ClientConnection

__all__ = ["DirectRoute", "error_headers", "read_body", "unless_disconnected"]

T = TypeVar("T")


class DirectRoute:
    """An ASGI application around a handler, without FastAPI's work for each call.

    For calls whose latency adds to the time to first token.
    """

    def __init__(self, handler: Callable[[Request], Awaitable[Response]]) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        response = await self._handler(request)
        await response(scope, receive, send)


def error_headers(error: MicroserveError) -> dict[str, str]:
    """Return `Retry-After`, in whole seconds, where a retry may help."""
    if isinstance(error, NoCapacity):
        return {"Retry-After": str(max(round(error.retry_after_s), 1))}
    return {}


async def read_body(request: Request, limit: int) -> bytes:
    """Return the request's body, to be parsed next. Raises as `engine.web.read_body`."""
    body = await web.read_body(request.scope, request.receive, limit)
    connection: ClientConnection | None = request.scope.get("state", {}).get("connection")
    if connection is not None:
        connection.release_body()  # it is parsed next, without a pause
    return body


async def unless_disconnected(request: Request, call: Coroutine[Any, Any, T]) -> T:
    """Run a call, and cancel it when the client disconnects (`BadRequest`)."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_outcome(call))
        watch = group.create_task(_cancel_on_disconnect(request, task))
        await asyncio.wait((task,))  # raises nothing, unlike the task group
        watch.cancel()
    if task.cancelled():
        raise BadRequest("the client disconnected")
    outcome = task.result()
    if isinstance(outcome, MicroserveError):
        raise outcome
    return outcome


async def _outcome(call: Coroutine[Any, Any, T]) -> T | MicroserveError:
    """Return a call's result or its error: raised, the task group would wrap the error."""
    try:
        return await call
    except MicroserveError as error:
        return error


async def _cancel_on_disconnect(request: Request, task: asyncio.Task[Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    task.cancel()

"""What precedes every handler: the key, calls by web pages, limits of bodies."""

from __future__ import annotations

import asyncio
import base64
import hmac
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.api.requests import error_headers
from engine.protocol import EngineConfig, MicroserveError, SlowClient, Unauthorized, error_body
from engine.web import (
    SAFE_METHODS,
    AllowedHosts,
    ClientConnection,
    check_input,
    check_origin,
    check_place,
    linger,
    read_body,
)

__all__ = ["BODY_TIMEOUT_S", "Gate"]

BODY_TIMEOUT_S = 30.0  # for a request's head, and for its body
OPEN = frozenset({"/health"})  # open to everybody: probes have no keys
METRICS = "/metrics"  # neither have scrapers
DOCS = frozenset({"/docs", "/redoc", "/openapi.json"})
OPEN_BODY = 1 << 16  # bytes


class Gate:
    """The ASGI application in front of an engine's API."""

    def __init__(self, api: ASGIApp, config: EngineConfig) -> None:
        self._api = api
        self._key = f"Bearer {config.api_key}".encode() if config.api_key else b""
        self._hosts = AllowedHosts.of(config.allowed_hosts, config.host, config.advertise)
        self._max_body = config.max_body_mb << 20

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. A body that has not arrived yet is read here, before any handler."""
        state: Mapping[str, Any] = scope.get("state") or {}
        connection: ClientConnection | None = state.get("connection")
        try:
            check_input(state)
            check_place(scope)
            self._admit(scope)
            if connection is not None and not connection.arrived:
                receive = await self._read(scope, receive)
        except MicroserveError as error:
            refusal = JSONResponse(error_body(error), error.status, error_headers(error))
            if isinstance(error, Unauthorized):
                asked = 'Basic realm="microserve engine"' if _is_docs(scope["path"]) else "Bearer"
                refusal.headers["WWW-Authenticate"] = asked
        else:
            await self._api(scope, receive, send)
            return
        # Not above: the error's traceback keeps what has been read of the body.
        if connection is None or not connection.gone:
            await _refuse(refusal, scope, receive, send, connection)

    def _admit(self, scope: Scope) -> None:
        """Check the key, or without one that no web page of another site calls.

        Paths are compared as the routes compare them. Raises `Unauthorized` or `Forbidden`.
        """
        path = scope["path"]
        if path in OPEN:
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in reversed(scope["headers"])
        }
        if self._key and path != METRICS:
            given = headers.get("authorization", "").encode("latin-1")
            if _is_docs(path):
                given = _as_bearer(given)
            if not hmac.compare_digest(given, self._key):
                raise Unauthorized("a valid API key is needed: Authorization: Bearer KEY")
        if not self._key or self._hosts.enforced:
            self._hosts.check(headers.get("host"))
        # Streams are opened by GET, and opening one ends another.
        if not self._key and (
            scope["method"] not in SAFE_METHODS or path.startswith("/microserving/")
        ):
            check_origin(headers)

    async def _read(self, scope: Scope, receive: Receive) -> Receive:
        """Read the body; return a `receive` that begins with it.

        Raises `TooLarge`, `BadRequest`, `Overloaded` or `SlowClient`.
        """
        open_to_all = scope["path"] in OPEN or scope["path"] == METRICS
        limit = min(self._max_body, OPEN_BODY) if open_to_all else self._max_body
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await read_body(scope, receive, limit)
        except TimeoutError:
            raise SlowClient(f"the body did not come within {BODY_TIMEOUT_S:g} s") from None
        bodies = [body]

        async def replay() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            return await receive()

        return replay


def _is_docs(path: str) -> bool:
    return path in DOCS or path.startswith("/docs/")


def _as_bearer(given: bytes) -> bytes:
    """Return the password of HTTP Basic as a bearer key: browsers can send no other.

    They send it by themselves, also for other sites' pages, so it opens the documentation only.
    """
    scheme, _, encoded = given.partition(b" ")
    if scheme.lower() != b"basic":
        return given
    try:
        return b"Bearer " + base64.b64decode(encoded, validate=True).partition(b":")[2]
    except ValueError:
        return b""


async def _refuse(
    response: JSONResponse,
    scope: Scope,
    receive: Receive,
    send: Send,
    connection: ClientConnection | None,
) -> None:
    """Send an error. If the request's body has not arrived, close the connection."""
    if connection is None or connection.arrived:
        await response(scope, receive, send)
        return
    response.headers["Connection"] = "close"
    head = {"status": response.status_code, "headers": response.raw_headers}
    await send({"type": "http.response.start", **head})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    await linger(connection, receive)
    await send({"type": "http.response.body", "body": b"", "more_body": False})

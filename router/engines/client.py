"""The microserving calls of one engine over HTTP; no other module knows their paths."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from engine.protocol import (
    EngineState,
    Internal,
    ModelInfo,
    PrefixChange,
    PrepRecvReply,
    RemoteSendReply,
    error_from_body,
)
from router.base import EngineUnreachable
from router.engines.api import Headers
from router.engines.http_client import HttpClient, Reply
from router.engines.token_mux import Delivery, TokenMux

__all__ = ["EngineClient"]

R = TypeVar("R", bound=BaseModel)
NO_HEADERS: Headers = {}


class EngineClient:
    """Calls to the engine at `url`.

    Every method raises `EngineUnreachable` if the engine cannot be reached or is lost during the
    call, and otherwise the error that the engine names. Cancellation closes the connection.
    """

    def __init__(self, http: HttpClient) -> None:
        self.url = http.url
        self._http = http
        self._token_mux = TokenMux(http)

    async def prep_recv(self, body: dict[str, Any], headers: Headers) -> PrepRecvReply:
        return _read(PrepRecvReply, await self._post("prep_recv", body, headers))

    async def remote_send(self, body: dict[str, Any], headers: Headers) -> RemoteSendReply:
        return _read(RemoteSendReply, await self._post("remote_send", body, headers))

    async def mirror(self, body: dict[str, Any], headers: Headers) -> None:
        await self._post("mirror", body, headers)

    async def commit(self, body: dict[str, Any], headers: Headers) -> None:
        await self._post("commit", body, headers)

    async def release(self, body: dict[str, Any], headers: Headers) -> None:
        await self._post("release", body, headers)

    async def pin(self, body: dict[str, Any], headers: Headers) -> int:
        return _count("pinned_tokens", await self._post("pin", body, headers))

    async def unpin(self, body: dict[str, Any], headers: Headers) -> int:
        return _count("unpinned_tokens", await self._post("unpin", body, headers))

    async def start_generate(self, body: dict[str, Any], headers: Headers) -> Delivery:
        """Start a generation; returns once the engine has accepted it."""
        stream = await self._token_mux.stream()
        delivery = stream.expect(body["request_id"])
        try:
            body = {**body, "stream": "mux", "stream_id": stream.id}
            await self._post("start_generate", body, headers)
        except BaseException:
            stream.forget(delivery)
            raise
        return delivery

    async def prefixes(self) -> AsyncGenerator[PrefixChange, None]:
        """Yield what the prefix cache holds, and then its changes, without end."""
        pieces: asyncio.Queue[bytes | EngineUnreachable] = asyncio.Queue()
        take = pieces.put_nowait
        reply, hang_up = await self._http.listen("/microserving/prefixes", take, take)
        _accepted(reply)
        try:
            rest = b""
            while isinstance(piece := await pieces.get(), bytes):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield _read(PrefixChange, line)
            raise piece
        finally:
            hang_up()

    async def model(self) -> ModelInfo:
        return _read(ModelInfo, await self._get("/microserving/model"))

    async def state(self) -> EngineState:
        return _read(EngineState, await self._get("/microserving/state"))

    async def health(self) -> None:
        """Return if the engine's loop makes progress."""
        await self._get("/health")

    async def _post(self, call: str, body: dict[str, Any], headers: Headers) -> bytes:
        data = orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)
        return _accepted(await self._http.call("POST", f"/microserving/{call}", data, headers))

    async def _get(self, path: str) -> bytes:
        return _accepted(await self._http.call("GET", path, b"", NO_HEADERS))


def _accepted(reply: Reply) -> bytes:
    """Return the body of a reply. Raises the error that it holds, if any."""
    if reply.status < 400:
        return reply.body
    try:
        fields = orjson.loads(reply.body)
    except ValueError:
        fields = f"{reply.status} {reply.body[:200]!r}"
    raise error_from_body(fields, retry_after=reply.retry_after)


def _read(message: type[R], body: bytes) -> R:
    try:
        return message.model_validate_json(body)
    except ValidationError as wrong:
        raise Internal(f"the engine's reply is no {message.__name__}: {wrong}") from None


def _count(name: str, body: bytes) -> int:
    try:
        return int(orjson.loads(body)[name])
    except (ValueError, TypeError, LookupError):
        raise Internal(f"the engine's reply has no {name}: {body[:200]!r}") from None

"""The microserving calls of one engine over HTTP. The only module that knows this wire.

Everything above speaks of `EngineClient` and `EventStream`, so that one multiplexed stream per
engine can replace one server-sent event stream per request without anybody noticing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any, TypeVar

import aiohttp
import orjson
from pydantic import BaseModel, ValidationError

from engine.protocol import (
    EngineState,
    Internal,
    MicroserveError,
    ModelInfo,
    PrepRecvReply,
    RemoteSendReply,
    Usage,
    error_from_body,
)
from router.errors import EngineUnreachable, NobodyListens
from router.request import Chunk

__all__ = ["EngineClient", "EventStream"]

END_OF_STREAM_S = 1.0
R = TypeVar("R", bound=BaseModel)
Headers = Mapping[str, str]


class EngineClient:
    """Calls to the engine at `url`.

    Every method raises `EngineUnreachable` where the engine cannot be reached or goes away in
    between, and the error that the engine names otherwise. Cancellation closes the connection.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def prep_recv(self, body: dict[str, Any], headers: Headers) -> PrepRecvReply:
        return _read(PrepRecvReply, await self._post("prep_recv", body, headers))

    async def remote_send(self, body: dict[str, Any], headers: Headers) -> RemoteSendReply:
        return _read(RemoteSendReply, await self._post("remote_send", body, headers))

    async def commit(self, body: dict[str, Any], headers: Headers) -> None:
        await self._post("commit", body, headers)

    async def release(self, body: dict[str, Any], headers: Headers) -> None:
        await self._post("release", body, headers)

    async def start_generate(self, body: dict[str, Any], headers: Headers) -> EventStream:
        """Start a generation; returns once the engine has accepted it."""
        return EventStream(await self._open("POST", "/microserving/start_generate", body, headers))

    async def model(self) -> ModelInfo:
        return _read(ModelInfo, await self._get("/microserving/model"))

    async def state(self) -> EngineState:
        return _read(EngineState, await self._get("/microserving/state"))

    async def health(self) -> None:
        """Returns if the engine's loop makes progress."""
        await self._get("/health")

    async def _post(self, call: str, body: dict[str, Any], headers: Headers) -> bytes:
        return await self._body(await self._open("POST", f"/microserving/{call}", body, headers))

    async def _get(self, path: str) -> bytes:
        return await self._body(await self._open("GET", path, None, {}))

    async def _open(
        self, method: str, path: str, body: dict[str, Any] | None, headers: Headers
    ) -> aiohttp.ClientResponse:
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)
        try:
            response = await self._session.request(
                method, self.url + path, data=data, headers={**self._headers, **headers}
            )
        except aiohttp.ClientConnectorError as error:
            raise NobodyListens(f"{self.url}: {_say(error)}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: no such host name
            raise EngineUnreachable(f"{self.url}: {_say(error)}") from error
        if response.status >= 400:
            raise _refusal(response, await self._body(response))
        return response

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        try:
            async with response:
                return await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnreachable(f"{self.url}: {_say(error)}") from error


class EventStream:
    """The server-sent events of one generation, as chunks. Not to be shared between tasks."""

    __slots__ = ("_buffer", "_chunks", "_response")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._buffer = b""
        self._chunks: deque[Chunk | MicroserveError] = deque()

    async def next(self) -> Chunk:
        """The next chunk. Raises what an error event says; `EngineUnreachable` if the stream ends.

        A generation ends with a chunk that has a `finish_reason`; nobody asks for more after it.
        """
        while not self._chunks:
            try:
                data = await self._response.content.readany()
            except (aiohttp.ClientError, OSError) as error:
                raise EngineUnreachable(f"the stream broke: {_say(error)}") from error
            if not data:
                raise EngineUnreachable("the stream ended before the generation did")
            *events, self._buffer = (self._buffer + data).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: "):
                    self._add(_chunk(event[6:]))
        chunk = self._chunks.popleft()
        if isinstance(chunk, MicroserveError):
            raise chunk
        return chunk

    def _add(self, chunk: Chunk | MicroserveError) -> None:
        """Steps that arrive together go on together: whoever reads late has less to do."""
        last = self._chunks[-1] if self._chunks else None
        if isinstance(last, Chunk) and isinstance(chunk, Chunk):
            last.extend(chunk)
        else:
            self._chunks.append(chunk)

    def abort(self) -> None:
        """Close the connection; a pending or later `next` raises `EngineUnreachable`."""
        self._response.close()

    async def finish(self) -> None:
        """Read what is left after the last chunk, so that the connection can be used again.

        All tokens are here: if the end does not come soon, only the connection is lost.
        """
        try:
            async with asyncio.timeout(END_OF_STREAM_S), self._response:
                await self._response.read()
        except (aiohttp.ClientError, OSError):  # TimeoutError is an OSError
            self._response.close()


def _chunk(data: bytes) -> Chunk | MicroserveError:
    try:
        fields = orjson.loads(data)
        if error := fields.pop("error", None):
            return error_from_body(error if "error" in error else {"error": error})
        chunk = Chunk(**fields)
        if chunk.usage is not None:
            chunk.usage = Usage.model_validate(chunk.usage)
    except (ValueError, TypeError, AttributeError) as wrong:
        return Internal(f"the engine sent an event that is none: {wrong}")
    return chunk


def _read(message: type[R], body: bytes) -> R:
    try:
        return message.model_validate_json(body)
    except ValidationError as wrong:
        raise Internal(f"the engine's reply is no {message.__name__}: {wrong}") from None


def _refusal(response: aiohttp.ClientResponse, body: bytes) -> MicroserveError:
    try:
        fields = orjson.loads(body)
    except ValueError:
        fields = f"{response.status} {body[:200]!r}"
    return error_from_body(fields, retry_after=response.headers.get("Retry-After"))


def _say(error: BaseException) -> str:
    return str(error) or type(error).__name__

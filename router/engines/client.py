"""The microserving calls of one engine over HTTP; no other module knows their paths."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from engine.protocol import (
    EngineState,
    EngineStatistics,
    EngineTimeline,
    Internal,
    LendHomeReply,
    ModelInfo,
    PrefixChange,
    PrepRecvReply,
    RemoteSendReply,
    Sampling,
    error_from_body,
)
from router.base import BadReply, EngineUnreachable
from router.engines.api import Headers
from router.engines.http_client import HttpClient, Reply
from router.engines.lines import Lines
from router.engines.token_mux import ANY, Delivery, TokenMux

__all__ = ["EngineClient"]

R = TypeVar("R", bound=BaseModel)
NO_HEADERS: Headers = {}
DEFAULT_MAX_TOKENS: int = Sampling.model_fields["max_tokens"].default
# The largest legal replies (bytes).
SMALL = 64 << 10
ADDRESS = 16 << 20  # an address travels on in a request, which engines limit to this by default
STATE = 2 << 20  # 1024 leases of 500 bytes, and more of the rest
STATISTICS = 1 << 20  # 4096 steps and 1024 puts, with numbers as long as they may be
TIMELINE = 4 << 20  # 16384 steps and 4096 puts, with their requests
MODEL = 64 << 20  # a tokenizer with a vocabulary of 256 k tokens takes 34 MB as JSON
FRAME = 256 << 10  # changes of prefixes: 8192 names of 19 bytes each, and as much again
MESSAGE = 500  # characters of an error about a reply
# Changes of prefixes are read at a pace, so that an engine that sends them without end leaves the
# event loop to others.
BATCH = 64 << 10  # bytes read in a row
PACE = 4 << 20  # bytes a second
WAITING = 24 << 20  # bytes that wait for it: the names of 2^20 pages
LINE = 128  # bytes that the rest of the work on a line is worth


class EngineClient:
    """Calls to the engine at `url`.

    Every method raises `EngineUnreachable` if the engine cannot be reached or is lost during the
    call, `BadReply` if its reply breaks the protocol, and otherwise the error that the engine
    names. Cancellation closes the connection.
    """

    def __init__(self, http: HttpClient) -> None:
        self.url = http.url
        self._http = http
        self._token_mux = TokenMux(http)
        self._vocab = ANY
        self._state_tells_health = False

    async def prep_recv(self, body: dict[str, Any], headers: Headers) -> PrepRecvReply:
        reply = _read(PrepRecvReply, await self._post("prep_recv", body, headers, most=ADDRESS))
        if not reply.match_len <= reply.end == body["end"]:
            raise BadReply(
                f"the engine made a lease of [{reply.match_len}, {reply.end}) for end={body['end']}"
            )
        return reply

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

    async def set_creditors(self, body: dict[str, Any], headers: Headers) -> None:
        await self._post("lend/creditors", body, headers)

    async def bring_home(self, body: dict[str, Any], headers: Headers) -> LendHomeReply:
        return _read(LendHomeReply, await self._post("lend/home", body, headers))

    async def start_generate(self, body: dict[str, Any], headers: Headers) -> Delivery:
        """Start a generation; returns once the engine has accepted it."""
        stream = await self._token_mux.stream()
        tokens = body.get("max_tokens", DEFAULT_MAX_TOKENS) - len(body.get("output", ()))
        delivery = stream.expect(body["request_id"], tokens=tokens, vocab=self._vocab)
        try:
            body = {**body, "stream": "mux", "stream_id": stream.id}
            await self._post("start_generate", body, headers)
        except BaseException:
            stream.forget(delivery)
            raise
        return delivery

    async def prefixes(self) -> AsyncGenerator[PrefixChange, None]:
        """Yield what the prefix cache holds, and then its changes, without end."""
        feed = _Feed()
        reply, hang_up = await self._http.listen("/microserving/prefixes", feed.take, feed.lose)
        try:
            _accepted(reply)
            done = 0
            while True:
                line = await feed.next()
                yield _read(PrefixChange, line)
                done += len(line) + LINE
                if done >= BATCH:
                    await asyncio.sleep(done / PACE)
                    done = 0
        finally:
            hang_up()

    async def model(self) -> ModelInfo:
        body = await self._get("/microserving/model", most=MODEL)
        info = await asyncio.to_thread(_read, ModelInfo, body)
        self._vocab = info.vocab_size
        return info

    async def state(self) -> EngineState:
        state = _read(EngineState, await self._get("/microserving/state", most=STATE))
        self._state_tells_health = state.healthy is not None
        if state.healthy is False:
            raise Internal("the engine says that its loop makes no progress")
        return state

    async def statistics(self) -> EngineStatistics:
        body = await self._get("/microserving/statistics", most=STATISTICS)
        return await asyncio.to_thread(_read, EngineStatistics, body)

    async def timeline(self, seconds: float) -> EngineTimeline:
        path = f"/microserving/timeline?seconds={seconds:g}"
        if not seconds:
            return _read(EngineTimeline, await self._get(path))
        return await asyncio.to_thread(_read, EngineTimeline, await self._get(path, most=TIMELINE))

    async def health(self) -> None:
        """Return if the engine's loop makes progress, or if `state` is known to tell that."""
        if not self._state_tells_health:
            await self._get("/health")

    def close(self) -> None:
        """Close the token stream, and each connection when its call ends."""
        self._token_mux.close()
        self._http.retire()

    async def _post(
        self, call: str, body: dict[str, Any], headers: Headers, *, most: int = SMALL
    ) -> bytes:
        data = orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)
        path = f"/microserving/{call}"
        return _accepted(await self._http.call("POST", path, data, headers, most=most))

    async def _get(self, path: str, *, most: int = SMALL) -> bytes:
        return _accepted(await self._http.call("GET", path, b"", NO_HEADERS, most=most))


class _Feed:
    """The lines of a stream, which wait until they are read. More than `WAITING` bytes may not."""

    def __init__(self) -> None:
        self._lines = Lines(FRAME)
        self._ready: deque[bytes] = deque()
        self._bytes = 0  # in `_ready`
        self._error: EngineUnreachable | None = None
        self._changed = asyncio.Event()

    async def next(self) -> bytes:
        """Return the next line.

        Raises `EngineUnreachable` once the stream is lost: what came before is of no use then.
        """
        while self._error is None and not self._ready:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error
        line = self._ready.popleft()
        self._bytes -= len(line) + LINE
        return line

    def take(self, data: bytes) -> None:
        if self._error is not None:
            return
        try:
            for line in self._lines.feed(data):
                self._ready.append(line)
                self._bytes += len(line) + LINE
        except EngineUnreachable as error:
            self.lose(error)
        if self._bytes > WAITING:
            self.lose(EngineUnreachable("the engine's prefixes change faster than they are read"))
        self._changed.set()

    def lose(self, error: EngineUnreachable) -> None:
        self._error = self._error or error
        self._ready.clear()
        self._changed.set()


def _accepted(reply: Reply) -> bytes:
    """Return the body of a reply. Raises the error that it holds, if any."""
    if reply.status < 400:
        return reply.body
    try:
        fields = orjson.loads(reply.body)
    except ValueError:
        raise BadReply(f"not an error body: {reply.status} {reply.body[:200]!r}") from None
    raise error_from_body(fields, retry_after=reply.retry_after)


def _read(message: type[R], body: bytes) -> R:
    try:
        return message.model_validate_json(body)
    except ValidationError as wrong:
        first = wrong.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise BadReply(
            f"the engine's reply is no {message.__name__}: {where}: {first['msg']}"[:MESSAGE]
        ) from None


def _count(name: str, body: bytes) -> int:
    try:
        count = orjson.loads(body)[name]
    except (ValueError, TypeError, LookupError):
        count = None
    if not isinstance(count, int) or count < 0:
        raise BadReply(f"the engine's reply has no {name}: {body[:200]!r}")
    return count

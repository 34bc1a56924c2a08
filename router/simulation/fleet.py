"""The router's view of virtual engines: the calls of `router.engines`, in virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

from engine.latency import Profile
from engine.protocol import (
    Capability,
    Commit,
    EngineConfig,
    EngineState,
    EngineStatistics,
    EngineTimeline,
    Extend,
    Internal,
    LendAllocate,
    LendCreditors,
    LendFree,
    LendHome,
    LendHomeReply,
    LendRenew,
    LendSend,
    MicroserveError,
    Mirror,
    MirrorGeneration,
    ModelInfo,
    PeerUnreachable,
    Pin,
    PrefixChange,
    PrepRecv,
    PrepRecvReply,
    Release,
    RemoteSend,
    RemoteSendReply,
    StartGenerate,
    Unsupported,
)
from engine.virtual import (
    VOCAB,
    BorrowingSettings,
    Endpoint,
    EngineKind,
    VirtualEngine,
    VirtualLoanCalls,
    VirtualNetwork,
    VirtualStream,
)
from router.base import Chunk, EngineUnreachable, Mirrored, NobodyListens, Usage
from router.engines import Headers

__all__ = ["VirtualCalls", "VirtualFleet"]

T = TypeVar("T")
M = TypeVar("M")
# Words `w0 w1 …`: token i is the word wi.
TOKENIZER = (
    '{"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": {"type": "WordLevel", '
    f'"unk_token": "w0", "vocab": {json.dumps({f"w{i}": i for i in range(VOCAB)})}}}}}'
)


USUAL = EngineKind()
# Copied for each call: pydantic takes long to make all these fields.
PLAIN = StartGenerate(request_id="plain", prompt=[0])


def _empty() -> dict[str, Any]:
    """Return the fields that calls must not have in common."""
    return {"stop": [], "stop_token_ids": [], "logit_bias": {}, "output": []}


class VirtualFleet:
    """The engines of one event loop, which reach each other."""

    def __init__(
        self,
        *,
        call_s: float,
        most_at_once: int | None = None,
        borrowing: BorrowingSettings | None = None,
    ) -> None:
        """A call takes `call_s` beside the engine's own time, half of it on the way there.

        `most_at_once` and `borrowing` as of `VirtualEngine`.
        """
        self.call_s = call_s
        self.network = VirtualNetwork()
        self.engines: dict[str, VirtualCalls] = {}  # by URL
        self.dies_after: list[int] = []  # as of `VirtualCalls`
        self._peers: dict[str, Endpoint] = {}
        self._options: dict[str, Any] = {"borrowing": borrowing}
        if most_at_once is not None:
            self._options["most_at_once"] = most_at_once

    def add(self, config: EngineConfig, profile: Profile, kind: EngineKind = USUAL) -> VirtualCalls:
        """Add an engine. It answers `Unsupported` to calls that its kind does not support."""
        engine = VirtualEngine(
            config, profile, self.network, self._peers, self._extend, kind=kind,
            creditors=self._loan_calls(), **self._options,
        )  # fmt: skip
        calls = VirtualCalls(engine, self)
        self.engines[calls.url] = calls
        return calls

    def restart(self, url: str) -> None:
        """Replace a dead engine by one with the same configuration, an empty cache and a new epoch.

        The engine's calls reach it from now on.
        """
        calls = self.engines[url]
        old = calls.engine
        calls.engine = VirtualEngine(
            old.config, old.profile, self.network, self._peers, self._extend,
            kind=old.kind, epoch=old.identity.epoch + 1, creditors=self._loan_calls(),
            **self._options,
        )  # fmt: skip

    def connect(self, url: str) -> VirtualCalls:
        """Return the calls to the engine at a URL."""
        return self.engines[url]

    def check_integrity(self) -> None:
        """Check the pages of all engines that live, at rest. Raises `Internal`.

        Nothing is lent any more: it was given back, or its time is over.
        """
        for calls in self.engines.values():
            if calls.engine.alive:
                cache = calls.engine.cache
                cache.bookkeeping.lender.sweep()
                cache.check_integrity()
                if lent := cache.bookkeeping.lender.lent:
                    raise Internal(f"{lent} pages of {calls.url} are still lent")

    def _loan_calls(self) -> VirtualLoanCalls:
        return VirtualLoanCalls(self._lend, lambda url: self._alive(url) is not None)

    def _alive(self, url: str) -> VirtualEngine | None:
        calls = self.engines.get(url)
        return calls.engine if calls is not None and calls.engine.alive else None

    async def _lend(self, url: str, call: LendAllocate | LendFree | LendRenew | LendSend) -> Any:
        """Call a creditor, from one engine to another."""
        await asyncio.sleep(self.call_s / 2)
        if (peer := self._alive(url)) is None:
            raise PeerUnreachable(f"calling {url}: nobody listens")
        if isinstance(call, LendSend):
            reply: object = await peer.send_lent(call)
        else:
            reply = peer.lend(call)
        await asyncio.sleep(self.call_s / 2)
        return reply

    async def _extend(self, url: str, call: Extend) -> str:
        """Request more room in a lease, from one engine to another; return its new address."""
        await asyncio.sleep(self.call_s / 2)
        if (peer := self._alive(url)) is None:
            raise PeerUnreachable(f"requesting more room from {url}: nobody listens")
        reply = peer.extend(call)
        await asyncio.sleep(self.call_s / 2)
        return reply.kv_addr


class VirtualCalls:
    """The calls to one virtual engine (`router.engines.EngineCalls`).

    `fleet.dies_after` holds at most one number: the first engine to emit that many tokens in one
    stream dies, and empties it.
    """

    def __init__(self, engine: VirtualEngine, fleet: VirtualFleet) -> None:
        self.engine = engine
        self.fleet = fleet
        self.url = engine.identity.url

    async def prep_recv(self, body: dict[str, Any], headers: Headers) -> PrepRecvReply:
        self._check("prep_recv", *(("mirror",) if body.get("reserve") else ()))
        call = PrepRecv.model_construct(**body)
        return await self._call(lambda: self.engine.prep_recv(call))

    async def remote_send(self, body: dict[str, Any], headers: Headers) -> RemoteSendReply:
        self._check("remote_send")
        call = RemoteSend.model_construct(**body)
        await self._travel()
        try:
            reply = await self.engine.remote_send(call)
        except MicroserveError:
            self._check_alive()
            raise
        await self._travel()
        return reply

    async def start_generate(self, body: dict[str, Any], headers: Headers) -> VirtualChunks:
        call = PLAIN.model_copy(update={**_empty(), **body})
        if "forks" in body or "fork_of" in body:
            self._check("fork")
        if "mirror" in body:
            self._check("mirror")
            call.mirror = Mirror.model_construct(**body["mirror"])
        await self._travel()
        try:
            stream = await self.engine.start_generate(call)
        except MicroserveError:
            self._check_alive()
            raise
        try:
            await self._travel()
        except BaseException:
            stream.close()
            raise
        return VirtualChunks(stream, self)

    async def mirror(self, body: dict[str, Any], headers: Headers) -> None:
        self._check("mirror")
        call = MirrorGeneration.model_construct(**body)
        await self._call(lambda: self.engine.mirror(call))

    async def commit(self, body: dict[str, Any], headers: Headers) -> None:
        self._check("commit")
        call = Commit.model_construct(**body)
        await self._call(lambda: self.engine.commit(call.lease_id))

    async def release(self, body: dict[str, Any], headers: Headers) -> None:
        call = Release.model_construct(**body)
        await self._call(lambda: self.engine.release(call))

    async def pin(self, body: dict[str, Any], headers: Headers) -> int:
        self._check("pin")
        call = Pin.model_construct(**body)
        return await self._call(lambda: self.engine.pin(call))

    async def unpin(self, body: dict[str, Any], headers: Headers) -> int:
        self._check("pin")
        call = Pin.model_construct(**body)
        return await self._call(lambda: self.engine.unpin(call))

    async def set_creditors(self, body: dict[str, Any], headers: Headers) -> None:
        call = LendCreditors.model_validate(body)
        await self._call(lambda: self.engine.set_creditors(call))

    async def bring_home(self, body: dict[str, Any], headers: Headers) -> LendHomeReply:
        call = LendHome.model_validate(body)
        await self._travel()
        reply = await self.engine.bring_home(call)
        await self._travel()
        return reply

    async def prefixes(self) -> AsyncGenerator[PrefixChange, None]:
        self._check("prefixes")
        await self._travel()
        async for change in self.engine.prefixes():
            yield change
        self._check_alive()

    async def model(self) -> ModelInfo:
        profile = self.engine.profile
        return ModelInfo(
            name=profile.model, context_length=self.engine.context_length, vocab_size=VOCAB,
            eos_token_ids=[0], bos_token=None, eos_token="w0",  # noqa: S106  no password
            tokenizer_json=TOKENIZER,
            chat_template="{% for m in messages %}{{ m.content }} {% endfor %}",
            fingerprint=self.engine.identity.fingerprint,
            page_size=self.engine.config.page_size,
            kv_bytes_per_token=profile.kv_bytes_per_token,
            layers=profile.layers,
            capabilities=list(self.engine.kind.capabilities),
        )  # fmt: skip

    async def state(self) -> EngineState:
        self._check_alive()
        return self.engine.state()

    async def statistics(self) -> EngineStatistics:
        """Return its flags; a virtual engine's steps take the time that they are told to."""
        self._check("statistics")
        self._check_alive()
        config = self.engine.config
        return EngineStatistics(
            steps=[], puts=[], token_budget=config.token_budget, max_batch=config.max_batch,
            max_waiting=config.max_waiting, decode_slowdown=config.decode_slowdown,
            lease_ms=config.lease_ms,
        )  # fmt: skip

    async def timeline(self, seconds: float) -> EngineTimeline:
        """Raise `Unsupported`: `router.simulation.timeline` observes virtual engines directly."""
        raise Unsupported(f"{self.url} has no timeline")

    async def health(self) -> None:
        self._check_alive()
        await asyncio.sleep(0)

    def close(self) -> None:
        """Nothing is open."""

    def _check(self, *capabilities: Capability) -> None:
        """Raise `Unsupported` if the engine lacks one of them."""
        for capability in capabilities:
            if capability not in self.engine.kind.capabilities:
                raise Unsupported(f"{self.url} has no {capability}")

    async def _call(self, work: Callable[[], T]) -> T:
        await self._travel()
        result = work()
        await self._travel()
        return result

    async def _travel(self) -> None:
        """Take half of a call's round trip."""
        self._check_alive()
        await asyncio.sleep(self.fleet.call_s / 2)
        self._check_alive()

    def _check_alive(self) -> None:
        if not self.engine.alive:
            raise NobodyListens(f"{self.url}: it is dead")


class VirtualChunks:
    """A generation on a virtual engine (`router.engines.ChunkStream`)."""

    def __init__(self, stream: VirtualStream, calls: VirtualCalls) -> None:
        self._stream = stream
        self._calls = calls
        self._emitted = 0
        self._given_up = ""

    async def next(self) -> Chunk:
        dies_after = self._calls.fleet.dies_after
        if dies_after and self._emitted >= dies_after[0]:
            dies_after.clear()
            self._calls.engine.die()
        try:
            event = await self._stream.next()
        except PeerUnreachable:
            raise EngineUnreachable("the stream broke") from None
        except MicroserveError as error:
            if self._given_up:
                raise EngineUnreachable(self._given_up) from error
            raise
        self._emitted += len(event.token_ids)
        chunk = Chunk(event.token_ids, event.text, event.begin)
        chunk.finish_reason = event.finish_reason
        if (usage := event.usage) is not None:
            chunk.usage = Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        if (mirror := event.mirror) is not None:
            chunk.mirror = Mirrored(mirror.landed, mirror.lease_id, mirror.stopped, mirror.message)
        return chunk

    def progress(self) -> int | None:
        """Return how many events have arrived; None: a virtual engine is never silent."""
        return None

    def abort(self, reason: str = "the stream was given up") -> None:
        """Make a pending or later `next` raise `EngineUnreachable`; abort the generation."""
        self._given_up = self._given_up or reason
        self._stream.fail(EngineUnreachable(reason))

    async def finish(self) -> None:
        """Nothing is held after the last chunk."""

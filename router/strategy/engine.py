"""The microserving calls as a strategy makes them: one engine, seen by one attempt of one request.

The calls do the bookkeeping that no strategy should: they name the legs, write the receipt, count
the load, and end on every exit path what they began.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from engine.protocol import (
    BadAddress,
    BadRange,
    BadRequest,
    Capability,
    MicroserveError,
    NoCapacity,
    RemoteSendReply,
)
from router.base import EngineId, LeaseId, Request
from router.engines import Backend, Role
from router.legs import Attempt, LeaseGrant, Method, MirrorPlan, Origin, TokenStream

__all__ = ["Engine", "Lease", "Mirror"]

EXCEEDS_POOL = "exceeds_pool"  # an engine's error, and the receipt's fallback


@dataclass(frozen=True, slots=True)
class Mirror:
    """Asks for a replica of a generation, which gets the new KV every `every` tokens.

    The replica is on the next engine of the ring. With `key`, it is on the engine with the lowest
    `key(engine)`; ties go to the next of them in the ring.
    """

    every: int = 16
    key: Callable[[Engine], Any] | None = None

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be 1 or more, not {self.every}")


class Lease:
    """Room on `engine` for the KV of `tokens[match_len:end]`; `tokens[:match_len]` is there.

    A collapsed lease holds no room: sender and receiver are one engine, or exchange no KV, or what
    was sent is in the prefix cache already. Nothing needs to be sent, and `match_len` is `end`.
    """

    __slots__ = ("_grant", "engine")

    def __init__(self, engine: Engine, grant: LeaseGrant) -> None:
        self.engine = engine
        self._grant = grant

    @property
    def lease_id(self) -> LeaseId:
        return self._grant.lease_id

    @property
    def kv_addr(self) -> str:
        """The opaque address that senders put KV at."""
        return self._grant.kv_addr

    @property
    def match_len(self) -> int:
        return self._grant.match_len

    @property
    def end(self) -> int:
        return self._grant.end

    @property
    def collapsed(self) -> bool:
        return self._grant.collapsed

    @property
    def open(self) -> bool:
        """Whether an engine holds room for it."""
        return self._grant.open


class Engine:
    """One engine. Positions count in `request.tokens`; negative ones count from the end.

    Every call raises the error that the engine names, `EngineUnreachable` if the engine is gone,
    and `BadRange` for positions outside the tokens. A strategy need not catch these errors: the
    router runs the strategy again where that can help. A call that the engine does not support
    raises `Unsupported` before anything is sent; the strategy then runs again without this engine.
    """

    __slots__ = ("_attempt", "_backend")

    def __init__(self, attempt: Attempt, backend: Backend) -> None:
        self._attempt = attempt
        self._backend = backend

    @property
    def id(self) -> EngineId:
        return self._backend.id

    @property
    def role(self) -> Role:
        return self._backend.role

    @property
    def labels(self) -> Mapping[str, str]:
        """The operator's labels, such as `zone=eu-1`."""
        return self._backend.labels

    @property
    def load(self) -> int:
        """The work in flight there, in tokens of prefill (a stream counts as a few).

        This router's is exact. That of others is what the engine told at the last health check, and
        0 of engines that do not tell: vLLM's, and plain OpenAI servers.
        """
        return self._backend.load.total

    @property
    def lendable(self) -> int:
        """Pages that it would lend to another engine now, by its last heartbeat; 0 if unknown."""
        return self._attempt.runtime.registry.lending.lendable(self._backend)

    def can(self, capability: Capability) -> bool:
        """Whether the engine supports `prep_recv`, `remote_send`, `commit`, `pin`, `mirror`,
        `prefixes`, `statistics`, `fork` or `resume`. Raises `ValueError` for another name."""
        return self._backend.can(capability)

    def exchanges_kv_with(self, other: Engine) -> bool:
        """Whether KV can move between the two: equal weights, dtype, layout, page size, secret."""
        return self._backend.exchanges_with(other._backend)

    def sends_to(self, other: Engine) -> bool:
        """Whether `remote_send` of this engine can fill a lease on `other`."""
        return self._backend.sends_to(other._backend)

    def cached(self, request: Request, *, coming: bool = True) -> int:
        """Return how many of `request.tokens` need not be computed here.

        Counts full pages that are in the prefix cache, or with `coming` on their way into it; never
        the last token. The router follows an engine's cache from the first question on, so this is
        0 until the engine has answered. It stays 0 for an engine without `prefixes`.
        """
        if not self._backend.can("prefixes"):
            self._attempt.fallback("prefixes_unknown", once=True)
        prefixes = self._attempt.runtime.registry.prefixes
        return prefixes.cached(self._backend, request, len(request.tokens) - 1, coming=coming)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Engine) and other._backend is self._backend

    def __hash__(self) -> int:
        return hash(self._backend)

    def __repr__(self) -> str:
        return f"<Engine {self.id}>"

    @asynccontextmanager
    async def prep_recv(
        self, request: Request, *, end: int, reserve: int = 0
    ) -> AsyncIterator[Lease]:
        """Make room here for the KV of `tokens[:end]` (§3.1), and for `reserve` further tokens.

        Leaving by any exit (return, error, cancellation) ends the lease, unless `start_generate` or
        `commit` has taken it over. The lease is collapsed, and no call is made, with one engine
        left, and for more than half of the pool of an engine that borrows: it then computes all
        itself, as blocks of the context go elsewhere. It is collapsed too if the engine says that
        its pool could never hold it.
        """
        end = _position("end", end, request)
        grant = await self._room(request, end, reserve)
        with grant.reserved_load:
            try:
                yield Lease(self, grant)
            finally:
                await self._end(grant)

    async def remote_send(
        self, request: Request, kv: Lease, *, begin: int, end: int
    ) -> RemoteSendReply:
        """Put the KV of `tokens[begin:end]` at `kv`, computing here what is not cached (§3.1).

        Returns after the last byte has landed. Does nothing for an empty range. If `kv` is on this
        very engine, or on one that it exchanges no KV with, or if this engine's pool could never
        hold the range, the lease ends and the generation computes what it needs. Cancellation, and
        the loss of either engine, abort the send.
        """
        begin, end = _position("begin", begin, request), _position("end", end, request)
        if begin > end:
            raise BadRange(f"begin {begin} is after end {end}", param="begin")
        attempt, backend, grant = self._attempt, self._backend, kv._grant
        if kv.engine == self and not grant.collapsed:
            await self._collapse(grant)
        elif not grant.collapsed and not backend.exchanges_with(grant.backend):
            attempt.fallback("not_sent")
            await self._collapse(grant)
        with attempt.leg("remote_send", backend, begin, end) as leg:
            if grant.collapsed or begin == end:
                leg.collapsed = grant.collapsed
                return _nothing_sent()
            leg.to = grant.backend.id
            attempt.require(backend, "remote_send")
            body = {"prompt": request.tokens, "begin": begin, "end": end, "kv_addr": grant.kv_addr}
            if request.priority:
                body["priority"] = request.priority
            with (
                backend.load.work(tokens=end - begin),
                attempt.expect(backend, request, end) as expected,
            ):
                try:
                    reply = await attempt.call(
                        backend, backend.client.remote_send, body, receiver=grant.backend
                    )
                except (BadAddress, BadRequest) as error:
                    fallback = _unsendable(error, backend, grant.backend)
                    if not fallback:
                        raise
                    leg.fail(error)
                    leg.collapsed = True
                    attempt.fallback(fallback)
                    await self._collapse(grant)
                    return _nothing_sent()
                expected.landed()
            grant.note_sent(end)
            leg.bytes = reply.bytes
            leg.put_ms = reply.put_ms
            leg.sent_tokens = reply.sent_tokens
            leg.cached_tokens = reply.cached_tokens
            leg.computed_tokens = reply.computed_tokens
        attempt.put_computed += max(0, reply.sent_tokens - reply.cached_tokens)
        attempt.runtime.metrics.put(backend.id, grant.backend.id, reply.bytes)
        return reply

    def start_generate(
        self,
        request: Request,
        *,
        begin: int = 0,
        kv: Lease | None = None,
        mirror: Mirror | None = None,
    ) -> TokenStream:
        """Prefill `tokens[begin:]` here and decode (§3.1): an async iterator of chunks.

        With `kv`, `begin` is how much KV has been put there. Without it, `begin` is a hint, and 0
        always works. With `mirror`, the KV is kept on another engine too: if this one dies, the
        router runs the strategy again, which finds the replica in `cluster.replica` and passes it
        as `kv`; `begin` is ignored then.

        The attempt aborts the generation if it ends first.
        """
        plan = None
        if mirror is not None:
            attempt, key, rank = self._attempt, mirror.key, None
            if key is not None:

                def rank(backend: Backend) -> Any:
                    return key(Engine(attempt, backend))

            plan = MirrorPlan(mirror.every, rank)
        return self.resume(request, plan, begin=begin, kv=kv)

    def resume(
        self,
        request: Request,
        mirror: MirrorPlan | None,
        *,
        begin: int = 0,
        kv: Lease | None = None,
    ) -> TokenStream:
        """As `start_generate`, for the router itself: `mirror` is that of an earlier generation."""
        begin = _position("begin", begin, request)
        if kv is not None and kv.engine != self:
            raise BadRange(f"the lease is on {kv.engine.id}, not on {self.id}", param="kv")
        grant = kv._grant if kv is not None else None
        if grant is not None and grant.collapsed and not grant.committed:
            begin, grant = 0, None
        if grant is not None and grant.replica is not None:
            begin = min(grant.match_len, max(0, len(request.tokens) - 1))
        return TokenStream(self._attempt, self._backend, request, begin, grant, mirror=mirror)

    def fork(self, request: Request, origin: Origin) -> TokenStream:
        """Decode after the prompt of `origin`, which generates another choice here."""
        begin, fork_of = len(request.tokens) - 1, origin.request_id
        if not self._backend.can("fork"):  # its prefix cache may have the prompt's full pages
            return TokenStream(self._attempt, self._backend, request, 0, None, None, origin.mirror)
        return TokenStream(
            self._attempt, self._backend, request, begin, None, fork_of, origin.mirror
        )

    async def commit(self, kv: Lease) -> None:
        """Publish what has landed to this engine's prefix cache, and end the lease."""
        grant, backend = kv._grant, self._backend
        if grant.collapsed:
            return
        self._attempt.require(backend, "commit")
        with self._attempt.leg("commit", backend, grant.match_len, grant.end):
            await self._attempt.call(
                backend, backend.client.commit, {"lease_id": grant.lease_id}, named=False
            )
        grant.consumed = True
        grant.expected.landed()

    async def pin(self, prompt: Request | Sequence[int]) -> int:
        """Protect what is cached here of a prompt, a request's or plain tokens, from eviction.

        Returns how many tokens that are (full pages), and 0 if the engine has no room for another
        pin. Idempotent; lasts until `unpin` with the same prompt.
        """
        with suppress(NoCapacity):
            return await self._pin("pin", self._backend.client.pin, prompt)
        return 0

    async def unpin(self, prompt: Request | Sequence[int]) -> int:
        """End the protection; return how many tokens had it. Idempotent."""
        return await self._pin("unpin", self._backend.client.unpin, prompt)

    async def _pin(
        self, call: Literal["pin", "unpin"], method: Method[int], prompt: Request | Sequence[int]
    ) -> int:
        self._attempt.require(self._backend, "pin")
        tokens = prompt.tokens if isinstance(prompt, Request) else list(prompt)
        with self._attempt.leg(call, self._backend, 0, len(tokens)) as leg:
            pinned = await self._attempt.call(
                self._backend, method, {"prompt": tokens}, named=False
            )
            leg.match_len = pinned
        return pinned

    async def _room(self, request: Request, end: int, reserve: int) -> LeaseGrant:
        """Ask for room for a lease; return a collapsed grant if none is needed or can be had."""
        attempt, backend = self._attempt, self._backend
        asks = not attempt.alone
        if asks and not attempt.runtime.registry.rooms.leases(backend, end + reserve):
            attempt.fallback(EXCEEDS_POOL, once=True)
            asks = False
        if asks:
            attempt.require(backend, "prep_recv", *(("mirror",) if reserve else ()))
        with ExitStack() as load, attempt.leg("prep_recv", backend, 0, end) as leg:
            if asks:
                # Counts the stream to come: others choose their engines while this one waits.
                load.enter_context(backend.load.work(streams=1))
                expected = load.enter_context(attempt.expect(backend, request, end))
                body: dict[str, Any] = {"prompt": request.tokens, "end": end}
                if reserve:
                    body["reserve"] = reserve
                try:
                    reply = await attempt.call(backend, backend.client.prep_recv, body)
                except BadRequest as error:
                    if error.code != EXCEEDS_POOL:
                        raise
                    leg.fail(error)
                    attempt.fallback(EXCEEDS_POOL)
                else:
                    leg.begin = leg.match_len = reply.match_len
                    grant = LeaseGrant(
                        backend,
                        LeaseId(reply.lease_id),
                        reply.kv_addr,
                        reply.match_len,
                        reply.end,
                        reserved_load=load.pop_all(),
                        expected=expected,
                    )
                    attempt.grants.append(grant)
                    return grant
            leg.match_len, leg.collapsed = end, True
        return LeaseGrant.none(backend, end)

    async def _collapse(self, grant: LeaseGrant) -> None:
        """End a lease that nothing can be sent to."""
        await self._end(grant)
        grant.collapsed = True

    async def _end(self, grant: LeaseGrant) -> None:
        if grant.open:
            grant.consumed = True
            await self._attempt.release(grant.backend, {"lease_id": grant.lease_id})


def _unsendable(error: MicroserveError, sender: Backend, receiver: Backend) -> str:
    """Return the fallback for a send that could never succeed; empty for any other error."""
    if error.code == EXCEEDS_POOL:
        return EXCEEDS_POOL
    secrets = sender.secret_digest, receiver.secret_digest  # known ones are equal
    return "not_sent" if isinstance(error, BadAddress) and None in secrets else ""


def _nothing_sent() -> RemoteSendReply:
    return RemoteSendReply(sent_tokens=0, cached_tokens=0, computed_tokens=0, bytes=0, ms=0.0)


def _position(name: str, position: int, request: Request) -> int:
    length = len(request.tokens)
    absolute = position + length if position < 0 else position
    if not 0 <= absolute <= length:
        raise BadRange(f"{name}={position} is outside of {length} tokens", param=name)
    return absolute

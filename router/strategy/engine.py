"""The microserving calls as a strategy makes them: one engine, seen by one attempt of one request.

These scopes do what no strategy should: name the legs, write the receipt, count the load, and end
on every exit path what was begun.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

from engine.protocol import BadRange, NoCapacity, RemoteSendReply
from router.base.ids import EngineId, EngineRequestId, LeaseId
from router.base.request import Request
from router.engines.backend import Backend, Role
from router.legs.choices import Origin
from router.legs.replica import Mirror
from router.legs.token_stream import TokenStream
from router.strategy.lease import Lease

if TYPE_CHECKING:
    from router.legs.attempt import Attempt, Method

__all__ = ["Engine"]


class Engine:
    """One engine. Positions count in `request.tokens`; negative ones count from the end.

    Every call raises the error that the engine names, `EngineUnreachable` where it is gone, and
    `BadRange` for positions outside the tokens. Those errors are for the request's scope, which
    runs the strategy again where that can help; a strategy need not catch them.
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
        """What the operator says of it, as `zone=eu-1`."""
        return self._backend.labels

    @property
    def load(self) -> int:
        """This router's work in flight there, in tokens of prefill (a stream weighs like a few)."""
        return self._backend.load.weight

    def cached(self, request: Request, *, coming: bool = True) -> int:
        """How many of `request.tokens` need not be computed here: full pages that are in the prefix
        cache, or `coming` into it; the last token is never among them.

        What engines have cached is followed from the first question on. Until an engine has
        answered it is 0.
        """
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
        """Make room here for the KV of `tokens[:end]` (§3.1); `reserve`: for so many more tokens.

        Leaving by any door (return, error, cancellation) ends the lease, unless `start_generate`
        or `commit` has taken it over. With one engine left the lease is collapsed: no call is made.
        """
        end = _position("end", end, request)
        attempt, backend = self._attempt, self._backend
        if attempt.alone:
            with attempt.leg("prep_recv", backend, 0, end) as leg:
                leg.match_len, leg.collapsed = end, True
            yield Lease.none(self, end)
            return
        body: dict[str, Any] = {"prompt": request.tokens, "end": end}
        if reserve:
            body["reserve"] = reserve
        with ExitStack() as expected:
            # A stream to be: other requests choose their engines while this one waits.
            expected.enter_context(backend.load.work(streams=1))
            coming = expected.enter_context(attempt.expect(backend, request, end))
            with attempt.leg("prep_recv", backend, 0, end) as leg:
                reply = await attempt.call(backend, backend.client.prep_recv, body)
                leg.begin = leg.match_len = reply.match_len
            lease = Lease(
                self,
                LeaseId(reply.lease_id),
                reply.kv_addr,
                reply.match_len,
                reply.end,
                expected=expected,
                coming=coming,
            )
            attempt.leases.append((backend, lease))
            try:
                yield lease
            finally:
                await self._end(lease)

    async def remote_send(
        self, request: Request, kv: Lease, *, begin: int, end: int
    ) -> RemoteSendReply:
        """Put the KV of `tokens[begin:end]`, computed here where it is not cached, at `kv` (§3.1).

        Returns after the last byte has landed. Does nothing for an empty range, and where `kv` is
        on this engine itself: the lease is ended then, and the generation computes what it needs.
        Cancellation, and the loss of either engine, aborts the send.
        """
        begin, end = _position("begin", begin, request), _position("end", end, request)
        if begin > end:
            raise BadRange(f"begin {begin} is after end {end}", param="begin")
        attempt, backend = self._attempt, self._backend
        if kv.engine == self and not kv.collapsed:
            await self._end(kv)
            kv.collapsed = True
        with attempt.leg("remote_send", backend, begin, end) as leg:
            if kv.collapsed or begin == end:
                leg.collapsed = kv.collapsed
                return RemoteSendReply(
                    sent_tokens=0, cached_tokens=0, computed_tokens=0, bytes=0, ms=0.0
                )
            body = {"prompt": request.tokens, "begin": begin, "end": end, "kv_addr": kv.kv_addr}
            if request.priority:
                body["priority"] = request.priority
            with (
                backend.load.work(tokens=end - begin),
                attempt.expect(backend, request, end) as coming,
            ):
                reply = await attempt.call(
                    backend, backend.client.remote_send, body, receiver=kv.engine._backend
                )
                coming.landed()
            leg.bytes = reply.bytes
            leg.put_ms = reply.put_ms
            leg.sent_tokens = reply.sent_tokens
            leg.cached_tokens = reply.cached_tokens
            leg.computed_tokens = reply.computed_tokens
        attempt.put_computed += max(0, reply.sent_tokens - reply.cached_tokens)
        attempt.runtime.metrics.put_bytes.inc(reply.bytes)
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

        With `kv`, `begin` is how much KV has been put there. Without, it is a hint, and 0 just
        generates. With `mirror`, its KV is kept on another engine too. If this one dies, the
        strategy is run again and finds it in `cluster.replica`, to be given as `kv`; `begin` does
        not count then.

        The generation is aborted when the attempt ends before it does.
        """
        begin = _position("begin", begin, request)
        if kv is not None and kv.engine != self:
            raise BadRange(f"the lease is on {kv.engine.id}, not on {self.id}", param="kv")
        if kv is not None and kv.collapsed:
            begin, kv = 0, None
        if kv is not None and kv.replica is not None:
            begin = min(kv.match_len, max(0, len(request.tokens) - 1))
        return self._stream(request, begin, kv, mirror)

    def fork(self, request: Request, origin: Origin) -> TokenStream:
        """Decode after the prompt of `origin`, a generation here of another choice."""
        begin = len(request.tokens) - 1
        return self._stream(request, begin, None, origin.mirror, origin.request_id)

    def _stream(
        self,
        request: Request,
        begin: int,
        kv: Lease | None,
        mirror: Mirror | None,
        fork_of: EngineRequestId | None = None,
    ) -> TokenStream:
        attempt, rank = self._attempt, None
        if mirror is not None and (key := mirror.key) is not None:

            def rank(backend: Backend) -> Any:
                return key(Engine(attempt, backend))

        return TokenStream(attempt, self._backend, request, begin, kv, fork_of, mirror, rank)

    async def commit(self, kv: Lease) -> None:
        """Publish what has landed to this engine's prefix cache; ends the lease."""
        if kv.collapsed:
            return
        with self._attempt.leg("commit", self._backend, kv.match_len, kv.end):
            await self._attempt.call(
                self._backend, self._backend.client.commit, {"lease_id": kv.lease_id}, named=False
            )
        kv.consumed = True
        kv.coming.landed()

    async def pin(self, prompt: Request | Sequence[int]) -> int:
        """Keep from eviction what is cached here of a prompt, a request's or plain tokens.

        Returns how many tokens that are (full pages); 0 also where the engine has no room for
        another pin. Idempotent; lasts until `unpin` with the same prompt.
        """
        with suppress(NoCapacity):
            return await self._pin("pin", self._backend.client.pin, prompt)
        return 0

    async def unpin(self, prompt: Request | Sequence[int]) -> int:
        """Keep it no longer; returns how many tokens were kept. Idempotent."""
        return await self._pin("unpin", self._backend.client.unpin, prompt)

    async def _pin(
        self, call: Literal["pin", "unpin"], method: Method[int], prompt: Request | Sequence[int]
    ) -> int:
        tokens = prompt.tokens if isinstance(prompt, Request) else list(prompt)
        with self._attempt.leg(call, self._backend, 0, len(tokens)) as leg:
            kept = await self._attempt.call(self._backend, method, {"prompt": tokens}, named=False)
            leg.match_len = kept
        return kept

    async def _end(self, lease: Lease) -> None:
        if lease.open:
            lease.consumed = True
            await self._attempt.release(lease.engine._backend, {"lease_id": lease.lease_id})


def _position(name: str, position: int, request: Request) -> int:
    length = len(request.tokens)
    absolute = position + length if position < 0 else position
    if not 0 <= absolute <= length:
        raise BadRange(f"{name}={position} is outside of {length} tokens", param=name)
    return absolute

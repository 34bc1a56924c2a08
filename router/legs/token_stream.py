"""One running generation: an async iterator of chunks that its attempt ends."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec.structs import replace

from engine.protocol import BadAddress, LeaseExpired, MicroserveError, UnknownLease
from router.base import Chunk, EngineRequestId, EngineUnreachable, Request
from router.engines import NOTHING, Backend, ChunkStream, Expected
from router.legs.arrival import arrival
from router.legs.attempt import Attempt
from router.legs.choices import Origin
from router.legs.committed_replica import CommittedReplica
from router.legs.grant import LeaseGrant
from router.legs.replica import MirrorPlan
from router.legs.replica_upkeep import ReplicaUpkeep
from router.telemetry import Leg

__all__ = ["TokenStream"]

ARRIVAL = 2.0  # health timeouts: an engine that is silent for one is down


class TokenStream:
    """What `start_generate` returns; the engine is called when the first chunk is requested.

    An async generator would stay open after an early exit from `async for` until the garbage
    collector runs. This is a class instead, and the attempt stops it when it ends.
    """

    __slots__ = (
        "_attempt",
        "_backend",
        "_begin",
        "_context",
        "_expected",
        "_fork_of",
        "_kv",
        "_leg",
        "_load",
        "_over",
        "_request",
        "_stream",
        "_upkeep",
        "mirror",
    )  # fmt: skip

    def __init__(
        self,
        attempt: Attempt,
        backend: Backend,
        request: Request,
        begin: int,
        kv: LeaseGrant | None,
        fork_of: EngineRequestId | None = None,
        mirror: MirrorPlan | None = None,
    ) -> None:
        """`fork_of` names a generation on `backend` whose prompt's KV this one shares."""
        self._attempt = attempt
        self._backend = backend
        self._request = request
        self._begin = begin
        self._kv = kv
        self._fork_of = fork_of
        self._stream: ChunkStream | None = None
        self._leg: Leg | None = None
        self._over = False
        self.mirror = mirror
        self._upkeep = _upkeep(attempt, backend, request, mirror)
        self._expected: Expected = NOTHING  # pages on their way into its cache
        self._load = (0, 0)  # its part of the backend's load: tokens to prefill, streams
        self._context = 0  # likewise: tokens of a context that outgrows the pool there

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Chunk:
        if self._over:
            # Not earlier: the last chunk must not wait for the end of its stream.
            if self._stream is not None:
                stream, self._stream = self._stream, None
                await stream.finish()
            raise StopAsyncIteration
        try:
            if self._stream is None or self._leg is None:
                self._stream, self._leg = await self._open()
            chunk = await self._stream.next()
        except MicroserveError as error:
            self._attempt.note_failure(error, self._backend)
            if self._leg is not None:
                self._leg.fail(error)
                if not isinstance(error, EngineUnreachable):
                    self._over = True  # the engine has ended it: nothing is left to abort
                    self._close(self._leg)
            raise
        leg = self._leg
        if chunk.begin is not None:
            leg.begin = chunk.begin
            here = min(leg.begin, len(self._request.prompt)) - self._attempt.put_computed
            leg.cached_tokens = max(0, here)
            if self._request.output:
                leg.recomputed_tokens = max(0, leg.end - leg.begin)
        if leg.first_token_ms is None and chunk.token_ids:
            leg.first_token_ms = self._attempt.receipt.elapsed_ms() - leg.start_ms
            self._count(0, 1)
            self._expected.landed()
        leg.tokens += len(chunk.token_ids)
        if self._upkeep is not None:
            self._upkeep.note(chunk)
        if chunk.finish_reason is not None:
            self._finish(chunk, leg)
        return chunk

    def stop(self) -> asyncio.Task[None] | None:
        """End it if it still runs; the engine is told in the task returned."""
        if self._over:
            if self._stream is not None:
                self._stream.abort()  # iteration stopped at the last chunk
            return None
        self._over = True
        if self._leg is None:
            return None  # no chunk was requested
        if self._leg.error is None:
            self._leg.fail(asyncio.CancelledError())
        release = self._attempt.spawn_release(self._backend)
        self._backend.load.end(*self._load, release)
        self._load = (0, 0)
        self._close(self._leg)
        return release

    async def aclose(self) -> None:
        """End it and wait until the engine has stopped. Idempotent; for `contextlib.aclosing`.

        Not needed for the last stream of a strategy, which ends with the strategy.
        """
        if (release := self.stop()) is not None:
            await self._attempt.runtime.releaser.wait(self._backend, release)

    @property
    def backend(self) -> Backend:
        return self._backend

    @property
    def tokens(self) -> int:
        """Tokens of prompt and output, up to the last emitted one."""
        return self._leg.end + self._leg.tokens if self._leg is not None else 0

    async def _open(self) -> tuple[ChunkStream, Leg]:
        attempt, backend, request = self._attempt, self._backend, self._request
        total = len(request.tokens)
        self._leg = leg = attempt.begin_leg("start_generate", backend, self._begin, total)
        attempt.streams.append(self)
        self._count(max(0, total - self._begin), 1)
        if attempt.runtime.registry.rooms.outgrows(backend, attempt.fills):
            self._context = attempt.fills
            backend.load.contexts += self._context
        self._expected = attempt.expect(backend, request, total)
        if self._kv is not None:
            self._kv.reserved_load.close()  # the stream itself is counted now
        body = request.sampling.model_dump(exclude_defaults=True)
        body["prompt"] = request.prompt
        if self._kv is None or self._kv.replica is None or self._kv.committed:
            body["begin"] = self._begin  # without it: what has landed
        if request.output:
            body["output"] = request.output
            if not backend.can("resume") and not request.greedy:
                attempt.fallback("inexact_resume", once=True)
        if request.priority:
            body["priority"] = request.priority
        if request.chunk_tokens > 1:
            body["stream_tokens"] = request.chunk_tokens
        elif interval := attempt.runtime.config.stream_interval_ms:
            body["stream_ms"] = interval
        if self._kv is not None and not self._kv.committed:
            body["lease_id"] = self._kv.lease_id
        if self._upkeep is not None:
            attempt.mirrored = True
            # After a failure the client waits for the next token: the replica is opened afterwards.
            if not request.output and (target := await self._upkeep.first(leg)):
                body["mirror"] = target
        if self._fork_of is not None:
            body["fork_of"] = self._fork_of
        choices, choice = attempt.choices, request.sampling.choice
        if choices is not None and (expected := choices.expected(choice)) and backend.can("fork"):
            body["forks"] = expected
        try:
            stream = await self._start(body)
        except BaseException:
            if self._upkeep is not None:
                self._upkeep.drop()  # it will stay empty
            raise
        if self._upkeep is not None:
            self._upkeep.begun(leg)
        if choices is not None:
            choices.started(choice, Origin(backend, attempt.request_id, self.mirror))
        if self._kv is not None:
            self._kv.taken()
        if self._over:  # stopped during the call
            stream.abort()
        else:
            backend.watch(stream)
        return stream, leg

    async def _start(self, body: dict[str, Any]) -> ChunkStream:
        """Start the generation; without the mirror if the engine refuses the mirror's address."""
        try:
            return await self._accepted(body)
        except BadAddress:
            if self._upkeep is None or not body.pop("mirror", None):
                raise
            self._upkeep.drop("bad_address")
            return await self._attempt.start(self._backend, body)
        except (LeaseExpired, UnknownLease):
            if self._kv is not None and self._kv.replica is not None:
                self._kv.replica.forget()  # or the next attempt would try it again
            raise

    async def _accepted(self, body: dict[str, Any]) -> ChunkStream:
        """Wait until the engine accepts the generation: with a lease, until its KV has landed."""
        attempt, backend, grant = self._attempt, self._backend, self._kv
        call = attempt.start(backend, body)
        # An engine compiles a grammar before it looks at the lease, which can take longer.
        if grant is None or grant.replica is not None or self._request.sampling.structure:
            return await call
        return await arrival(
            call,
            grant,
            self._begin,
            ARRIVAL * attempt.runtime.config.health_timeout_s,
            lambda: attempt.spawn_release(backend, lease_id=grant.lease_id),
        )

    def _count(self, tokens: int, streams: int) -> None:
        """Set its part of the backend's load."""
        load, (old_tokens, old_streams) = self._backend.load, self._load
        load.add(tokens - old_tokens, streams - old_streams)
        self._load = (tokens, streams)

    def _finish(self, chunk: Chunk, leg: Leg) -> None:
        self._over = True
        if chunk.usage is not None:
            # Tokens that this attempt has computed elsewhere and put here were not cached.
            cached = max(0, chunk.usage.cached_tokens - self._attempt.put_computed)
            if self._request.output:  # nor were those of earlier attempts
                cached = self._first_leg().cached_tokens
            if cached != chunk.usage.cached_tokens:
                chunk.usage = replace(chunk.usage, cached_tokens=cached)
            leg.cached_tokens = cached
        leg.computed_tokens = max(0, leg.end - leg.begin)
        self._close(leg)
        self._attempt.note_success(self._backend)

    def _first_leg(self) -> Leg:
        """Return the leg of this choice's first generation, before which nothing was computed."""
        choice = self._request.sampling.choice
        return next(
            leg
            for leg in self._attempt.receipt.legs
            if leg.call == "start_generate" and leg.choice == choice
        )

    def _close(self, leg: Leg) -> None:
        leg.ms = self._attempt.receipt.elapsed_ms() - leg.start_ms
        self._count(0, 0)
        self._backend.load.contexts -= self._context
        self._context = 0
        self._expected.end()
        if self._upkeep is not None:
            self._upkeep.end()
        if self._stream is not None:
            self._backend.unwatch(self._stream)
            if leg.error is not None:
                self._stream.abort()


def _upkeep(
    attempt: Attempt, backend: Backend, request: Request, mirror: MirrorPlan | None
) -> ReplicaUpkeep | CommittedReplica | None:
    """Return what keeps the replica of a generation on `backend`, if there shall be one."""
    if mirror is None:
        return None
    mirrors = ReplicaUpkeep(attempt, backend, mirror, request)
    if backend.can("mirror") and mirrors.possible:
        return mirrors
    commits = CommittedReplica(attempt, backend, mirror, request)
    return mirrors if backend.can("mirror") and not commits.possible else commits

"""The scope of one choice: runs the strategy, and is the one place that retries.

drive ──► Attempt 1 ──► strategy ──► legs          an engine dies: its legs fail
  │                                                 the strategy's `async with`s release
  └─────► Attempt 2 ──► the same strategy, with `request.output` = what was emitted
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace

from engine.protocol import (
    BadAddress,
    BadRange,
    BadRequest,
    Draining,
    Internal,
    MicroserveError,
    NoCapacity,
    TooLarge,
    Unauthorized,
)
from router.admission.queue import AdmissionQueue, Place
from router.admission.retry_budget import Claim
from router.base.errors import EngineUnreachable, Moved, NoEngines, StrategyError
from router.base.request import Chunk, Request
from router.engines.backend import Backend
from router.execution.relocation import relocated
from router.execution.strategy_run import Emit, StrategyRun
from router.legs.attempt import Attempt, Runtime
from router.legs.replica import Replicas
from router.legs.token_stream import TokenStream
from router.rollout.revisions import Generation
from router.strategy.cluster import Cluster
from router.strategy.engine import Engine
from router.telemetry.receipts import Receipt

__all__ = ["ChoiceRunner"]

# Not worth a second try: the same request fails again anywhere.
FINAL = (BadRequest, BadRange, BadAddress, Unauthorized, TooLarge, StrategyError, NoEngines)
# An attempt that came so many tokens further was none that fails always.
PROGRESS_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ChoiceRunner:
    """All that the choices of one client request have in common."""

    runtime: Runtime
    backlog: AdmissionQueue
    generation: Generation
    receipt: Receipt
    headers: Mapping[str, str]  # sent on every leg
    arrived: float  # loop time
    priority: int = 0  # in the queue: lower is earlier

    async def drive(self, request: Request, emit: Emit) -> None:
        """Run the strategy for `request` until its stream is finished, `emit`ting its chunks.

        A failed attempt is followed by another one that goes on after what was emitted, on other
        engines, `attempts` in all, as long as the budget for retries lasts. No room on an engine is
        waited for. Raises the last error; a strategy's own failure as `StrategyError`.
        Cancellation, and an `emit` that raises, end every leg.
        """
        with (
            self.backlog.place(self.priority, self.arrived) as place,
            self.runtime.retries.request() as claim,
        ):
            await self._drive(request, emit, place, claim)

    async def _drive(self, request: Request, emit: Emit, place: Place, claim: Claim) -> None:
        replicas = Replicas(self.runtime.releaser, self.headers)
        try:
            await self._try(request, emit, place, claim, replicas)
        finally:
            if replicas:
                await replicas.close()

    async def _try(
        self, request: Request, emit: Emit, place: Place, claim: Claim, replicas: Replicas
    ) -> None:
        failed: set[Backend] = set()
        full: NoCapacity | None = None
        origin: TokenStream | None = None  # what is to go on elsewhere
        tries = 1
        for number in itertools.count(1):
            if end := self._already_finished(request):
                if (reading := emit(end)) is not None:
                    await reading
                return
            await self._turn(place, full)
            attempt = await self._attempt(request, number, failed, place, replicas)
            before = len(request.output)
            try:
                async with attempt:
                    with self.runtime.registry.moves.movable(attempt):
                        if origin is not None:
                            cluster = Cluster(attempt, {})
                            chunks = relocated(attempt, cluster, request, origin)
                            await self._pass_on(chunks, request, emit)
                        elif number > 1 or not await self._fork(attempt, request, emit):
                            await StrategyRun(self.generation, attempt, request, emit).finish()
                return
            except NoCapacity as error:
                full = error
            except MicroserveError as error:
                if len(request.output) - before >= PROGRESS_TOKENS:
                    tries = 1
                if not self._again(error, tries, claim):
                    raise self._for_client(error) from error
                full = None
                tries += not isinstance(error, Moved)
                failed |= attempt.blamed
                self._note_retry(error, attempt, request)
                origin = attempt.origin or (origin if isinstance(error, Moved) else None)
                if attempt.mirrored and replicas.settle() is None and origin is None:
                    attempt.fallback("recomputed")
            request = replace(request)  # `tokens` is cached: the output has grown since

    async def _turn(self, place: Place, full: NoCapacity | None) -> None:
        """Wait where there is no room, or where others wait already."""
        if full is None and not len(self.backlog):
            return
        deadline = self.arrived + self.runtime.config.queue_timeout_s
        with self.receipt.queueing():
            await place.wait(full, deadline=deadline)

    def _again(self, error: MicroserveError, tries: int, claim: Claim) -> bool:
        """Whether to try again after `error`, which ended the attempt number `tries`."""
        if isinstance(error, Moved):
            return True  # it has not failed
        if isinstance(error, FINAL) or tries == self.runtime.config.attempts:
            return False
        # The first time that an engine is lost: many are hit at once, and are not to blame.
        if tries == 1 and isinstance(error, EngineUnreachable | Draining):
            return True
        if claim.spend():
            return True
        self.runtime.metrics.retries_denied.inc()
        self.receipt.fallback("retry_denied")
        return False

    async def _attempt(
        self,
        request: Request,
        number: int,
        failed: set[Backend],
        place: Place,
        replicas: Replicas,
    ) -> Attempt:
        config, registry = self.runtime.config, self.runtime.registry
        backends = registry.usable(without=failed)
        if not backends:
            # Those that just lost a connection may be well: a moment, not a failure.
            await registry.settled(config.health_timeout_s)
            backends = registry.usable(without=failed)
        if not backends and request.output and config.engine_wait_s:
            with self.receipt.queueing():
                await registry.returned(config.engine_wait_s)
            backends = registry.usable(without=failed)
        if not backends:
            raise NoEngines("no engine is up")
        if len(backends) == 1:
            self.runtime.metrics.fallbacks.labels("collapsed").inc()
            self.receipt.fallback("collapsed")
        elif backends[0].breaker.resting:  # never among others that are not
            self.runtime.metrics.fallbacks.labels("breakers_open").inc()
            self.receipt.fallback("breakers_open")
        return Attempt(
            self.runtime,
            self.receipt,
            request_id=next(self.runtime.names),
            headers=self.headers,
            choice=request.sampling.choice,
            number=number,
            backends=backends,
            replicas=replicas,
            accepted=place.admitted,
        )

    async def _fork(self, attempt: Attempt, request: Request, emit: Emit) -> bool:
        """Generate where the first of the request's choices was started, without the strategy.

        Returns False if this is that first one, or it was not started anywhere.
        """
        siblings = request.siblings
        if siblings is None or not request.sampling.choice:
            return False
        origin = await siblings.origin()
        if origin is None:
            return False
        chunks = Engine(attempt, origin.backend).fork(request, origin)
        await self._pass_on(chunks, request, emit)
        return True

    async def _pass_on(
        self, chunks: AsyncGenerator[Chunk, None] | TokenStream, request: Request, emit: Emit
    ) -> None:
        async with aclosing(chunks):
            async for chunk in chunks:
                request.output.extend(chunk.token_ids)
                if (reading := emit(chunk)) is not None:
                    await reading

    def _already_finished(self, request: Request) -> Chunk | None:
        """The end that was lost, where an engine died between the last token and saying so."""
        sampling, output = request.sampling, request.output
        if not output:
            return None
        eos = self.runtime.registry.model.info.eos_token_ids
        ends = sampling.stop_token_ids if sampling.ignore_eos else [*eos, *sampling.stop_token_ids]
        grammar_ends = sampling.structure is not None and output[-1] in eos
        if grammar_ends or (output[-1] in ends and len(output) > sampling.min_tokens):
            return Chunk(finish_reason="stop")
        if len(output) >= sampling.max_tokens:
            return Chunk(finish_reason="length")
        return None

    def _for_client(self, error: MicroserveError) -> MicroserveError:
        """What the client is told: what engines say of leases, keys and ranges is none of its own
        making, so it must not look like that."""
        if isinstance(error, BadRange):
            return StrategyError(f"{self.generation.label}: {error.message}")
        if error.status >= 500 or isinstance(error, BadRequest | TooLarge):
            return error
        label = self.generation.label
        return Internal(f"{label}: {error.type}: {error.message}", code=error.type)

    def _note_retry(self, error: MicroserveError, attempt: Attempt, request: Request) -> None:
        self.runtime.metrics.retries.labels(error.type).inc()
        self.receipt.retries.append(
            {
                "choice": request.sampling.choice,
                "after_tokens": len(request.output),
                "error": {"type": error.type, "message": error.message},
                "engines": sorted(backend.id for backend in attempt.blamed),
                "at_ms": self.receipt.elapsed_ms(),
            }
        )

"""Runs one choice of a request, and is the one place that retries.

run ──► Attempt 1 ──► strategy ──► legs            an engine dies: its legs fail
  │                                                 the strategy's `async with`s release
  └───► Attempt 2 ──► the same strategy, with `request.output` = what was emitted
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from engine.protocol import (
    BLOCK_TOKENS,
    BadAddress,
    BadRange,
    BadRequest,
    Draining,
    Internal,
    MicroserveError,
    NoCapacity,
    TooLarge,
    Unauthorized,
    Unsupported,
)
from router.admission import AdmissionQueue, Claim, Place, RetryBudget
from router.base import Chunk, EngineUnreachable, Moved, NoEngines, Request, StrategyError
from router.engines import Backend
from router.execution.choice_writer import ChoiceWriter
from router.execution.relocation import Relocations, relocated
from router.execution.strategy_run import StrategyRun
from router.legs import Attempt, Choices, Replicas, Running, Runtime, TokenStream
from router.rollout import Revision
from router.strategy import Cluster, Engine
from router.telemetry import Receipt

__all__ = ["ChoiceRunner", "Execution"]

# Errors not worth a second try: the same request fails again anywhere.
FINAL = (BadRequest, BadRange, BadAddress, Unauthorized, TooLarge, StrategyError, NoEngines)
# This much progress resets the retry count.
PROGRESS_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Execution:
    """What the requests of one router share while they run."""

    runtime: Runtime
    queue: AdmissionQueue
    retries: RetryBudget
    relocations: Relocations


@dataclass(frozen=True, slots=True)
class ChoiceRunner:
    """Runs the choices of one client request."""

    execution: Execution
    revision: Revision
    receipt: Receipt
    headers: Mapping[str, str]  # sent on every leg
    arrived: float  # loop time
    priority: int = 0  # in the queue: lower is earlier

    async def run(
        self, request: Request, writer: ChoiceWriter, choices: Choices | None = None
    ) -> None:
        """Run the strategy for `request` until its stream ends, writing its chunks to `writer`.

        After a failed attempt, another one on other engines continues after what was written, up
        to `attempts` in all while the retry budget lasts. If engines have no room, it waits for
        some. Raises the last error; a strategy's own failure as `StrategyError`. Cancellation, and
        a `writer` that raises, end every leg.
        """
        execution = self.execution
        with (
            execution.queue.place(self.priority, self.arrived) as place,
            execution.retries.request() as claim,
        ):
            async with Replicas(execution.runtime.releaser, self.headers) as replicas:
                choice = _Choice(self, request, writer, choices, place, claim, replicas)
                await choice.run()


class _Choice:
    """The attempts at one choice."""

    def __init__(
        self,
        runner: ChoiceRunner,
        request: Request,
        writer: ChoiceWriter,
        choices: Choices | None,
        place: Place,
        claim: Claim,
        replicas: Replicas,
    ) -> None:
        self._runner = runner
        self._execution = runner.execution
        self._runtime = runner.execution.runtime
        self._receipt = runner.receipt
        self._request = request
        self._needs = len(request.prompt) + request.sampling.max_tokens  # tokens of context
        self._writer = writer
        self._choices = choices
        self._place = place
        self._claim = claim
        self._replicas = replicas
        self._failed: set[Backend] = set()  # engines to avoid
        self._origin: Running | None = None  # the generation to continue on another engine
        self._tries = 1

    async def run(self) -> None:
        full: NoCapacity | None = None
        for number in itertools.count(1):
            if written := self._writer.tokens:
                self._request = replace(self._request, output=list(written))
            if end := self._already_finished():
                await self._write(end)
                return
            await self._wait_for_turn(full)
            attempt = await self._attempt(number)
            before = len(self._writer.tokens)
            try:
                async with attempt:
                    with self._execution.relocations.movable(attempt):
                        await self._generate(attempt, number)
                return
            except NoCapacity as error:
                full = error
            except MicroserveError as error:
                full = None
                if len(self._writer.tokens) - before >= PROGRESS_TOKENS:
                    self._tries = 1
                self._prepare_retry(error, attempt)

    async def _wait_for_turn(self, full: NoCapacity | None) -> None:
        """Wait if an engine was just `full`, or if others wait already."""
        queue = self._execution.queue
        if full is None and not len(queue):
            return
        deadline = self._runner.arrived + self._runtime.config.queue_timeout_s
        with self._receipt.queueing(self._room_wanted(full), self._request.sampling.choice):
            await self._place.wait(full, deadline=deadline)

    def _room_wanted(self, full: NoCapacity | None) -> str:
        """Return what it waits for, in words."""
        if full is None:
            return "behind requests that wait for room"
        engine = self._receipt.refused_by()
        return f"for room on {engine}" if engine else "for room on an engine"

    async def _attempt(self, number: int) -> Attempt:
        """Return an attempt on the engines that are up. Raises `NoEngines` if none is."""
        backends = await self._backends()
        if len(backends) == 1:
            self._fallback("collapsed")
        elif backends[0].breaker.resting:  # then all of them rest
            self._fallback("breakers_open")
        return Attempt(
            self._runtime,
            self._receipt,
            request_id=next(self._runtime.names),
            headers=self._runner.headers,
            choice=self._request.sampling.choice,
            number=number,
            backends=backends,
            replicas=self._replicas,
            choices=self._choices,
            accepted=self._place.admitted,
            needs=self._needs,
            fills=self._fills(),
        )

    async def _backends(self) -> list[Backend]:
        config, registry = self._runtime.config, self._runtime.registry
        fills = self._fills()
        usable = partial(registry.usable, without=self._failed, holding=self._needs, filling=fills)
        if registry.rooms.short(backends := usable(), fills):
            why = f"for memory for {fills} tokens on an engine"
            with self._receipt.queueing(why, self._request.sampling.choice):
                deadline = self._runner.arrived + config.queue_timeout_s
                await registry.rooms.wait(usable, fills, deadline)
            backends = usable()
        if not backends:
            # Engines that just lost a connection may be well: wait for the next health check.
            await registry.settled(config.health_timeout_s)
            backends = usable()
        if not backends and self._request.output and config.engine_wait_s:
            with self._receipt.queueing("for an engine", self._request.sampling.choice):
                await registry.returned(config.engine_wait_s, holding=self._needs)
            backends = usable()
        if not backends:
            if registry.usable():
                raise NoEngines(registry.shortage(self._needs, fills))
            raise NoEngines("no engine is up")
        return backends

    def _fills(self) -> int:
        """Return the tokens for which an engine should have room before it begins.

        These are the known ones and a block of output. How much of `max_tokens` comes true is
        unknown, and clients ask for much.
        """
        left = self._request.sampling.max_tokens - len(self._request.output)
        return len(self._request.tokens) + min(left, BLOCK_TOKENS)

    async def _generate(self, attempt: Attempt, number: int) -> None:
        """Write the rest of the choice: relocated, forked, or by the strategy."""
        if self._origin is not None:
            cluster = Cluster(attempt, {})
            await self._pass_on(relocated(attempt, cluster, self._request, self._origin))
        elif number > 1 or not await self._fork(attempt):
            await StrategyRun(self._runner.revision, attempt, self._request, self._writer).finish()

    async def _fork(self, attempt: Attempt) -> bool:
        """Generate where the first of the request's choices was started, without the strategy.

        Returns False if this is that first choice, or it was not started anywhere.
        """
        if self._choices is None or not self._request.sampling.choice:
            return False
        origin = await self._choices.origin()
        if origin is None:
            return False
        await self._pass_on(Engine(attempt, origin.backend).fork(self._request, origin))
        return True

    async def _pass_on(self, chunks: AsyncGenerator[Chunk, None] | TokenStream) -> None:
        async with aclosing(chunks):
            async for chunk in chunks:
                await self._write(chunk)

    async def _write(self, chunk: Chunk) -> None:
        if (reading := self._writer.write(chunk)) is not None:
            await reading

    def _already_finished(self) -> Chunk | None:
        """Return the end that was lost if an engine died between the last token and saying so."""
        sampling, output = self._request.sampling, self._request.output
        if not output:
            return None
        eos = self._runtime.registry.model.info.eos_token_ids
        ends = sampling.stop_token_ids if sampling.ignore_eos else [*eos, *sampling.stop_token_ids]
        grammar_ends = sampling.structure is not None and output[-1] in eos
        if grammar_ends or (output[-1] in ends and len(output) > sampling.min_tokens):
            return Chunk(finish_reason="stop")
        if len(output) >= sampling.max_tokens:
            return Chunk(finish_reason="length")
        return None

    def _prepare_retry(self, error: MicroserveError, attempt: Attempt) -> None:
        """Note why `attempt` ended. Raises the client's error if there is no further attempt."""
        if not self._may_retry(error):
            raise self._for_client(error) from error
        self._tries += not isinstance(error, Moved) and self._origin is None
        self._failed |= attempt.blamed
        self._runtime.metrics.retries.labels(error.type).inc()
        self._receipt.retries.append(
            {
                "choice": self._request.sampling.choice,
                "after_tokens": len(self._writer.tokens),
                "error": {"type": error.type, "message": error.message},
                "engines": sorted(backend.id for backend in attempt.blamed),
                "at_ms": self._receipt.elapsed_ms(),
            }
        )
        self._origin = attempt.origin or (self._origin if isinstance(error, Moved) else None)
        if attempt.mirrored and self._replicas.settle() is None and self._origin is None:
            attempt.fallback("recomputed")

    def _may_retry(self, error: MicroserveError) -> bool:
        """Whether to try again after `error`."""
        if isinstance(error, Moved) or self._origin is not None:
            return True  # nothing has failed but a move: the strategy computes again what it lacks
        if isinstance(error, FINAL) or self._tries >= self._runtime.config.attempts:
            return False
        # The first loss of an engine is free: it hits many requests at once, through no fault of
        # theirs. So is the first call that an engine does not support: it has taken no work.
        if self._tries == 1 and isinstance(error, EngineUnreachable | Draining | Unsupported):
            return True
        if self._claim.spend():
            return True
        self._runtime.metrics.retries_denied.inc()
        self._receipt.fallback("retry_denied")
        return False

    def _for_client(self, error: MicroserveError) -> MicroserveError:
        """Return what the client is told.

        Engines' errors about leases, keys and ranges are not the client's doing, and must not look
        as if they were.
        """
        label = self._runner.revision.label
        if isinstance(error, BadRange):
            return StrategyError(f"{label}: {error.message}")
        if error.status >= 500 or isinstance(error, BadRequest | TooLarge):
            return error
        return Internal(f"{label}: {error.type}: {error.message}", code=error.type)

    def _fallback(self, name: str) -> None:
        self._runtime.metrics.fallbacks.labels(name).inc()
        self._receipt.fallback(name)

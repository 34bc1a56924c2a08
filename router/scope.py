"""The scope of one choice: runs the strategy, and is the one place that retries.

drive ──► Attempt 1 ──► strategy ──► legs          an engine dies: its legs fail
  │                                                 the strategy's `async with`s release
  └─────► Attempt 2 ──► the same strategy, with `request.output` = what was emitted
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from engine.protocol import (
    BadAddress,
    BadRange,
    BadRequest,
    Internal,
    MicroserveError,
    NoCapacity,
    TooLarge,
    Unauthorized,
)
from router.attempt import Attempt, Runtime
from router.backlog import Backlog
from router.cluster import Cluster
from router.errors import NoEngines, StrategyError, root_cause
from router.generations import Generation
from router.ids import EngineRequestId
from router.member import Member
from router.receipts import Receipt
from router.request import Chunk, Request
from router.token_stream import TokenStream

__all__ = ["Scope"]

log = logging.getLogger(__name__)
Emit = Callable[[Chunk], Awaitable[None]]

# Not worth a second try: the same request fails again anywhere.
FINAL = (BadRequest, BadRange, BadAddress, Unauthorized, TooLarge, StrategyError, NoEngines)
# Names of attempts on the engines: unique over routers and their restarts.
_ROUTER = uuid.uuid4().hex[:16]
_attempts = itertools.count()


@dataclass(frozen=True, slots=True)
class Scope:
    """All that the choices of one client request have in common."""

    runtime: Runtime
    backlog: Backlog
    generation: Generation
    receipt: Receipt
    headers: Mapping[str, str]  # sent on every leg
    arrived: float  # loop time

    async def drive(self, request: Request, emit: Emit) -> None:
        """Run the strategy for `request` until its stream is finished, `emit`ting its chunks.

        A failed attempt is followed by another one that goes on after what was emitted, on other
        engines, `attempts` in all. No room on an engine is waited for. Raises the last error; a
        strategy's own failure as `StrategyError`. Cancellation, and an `emit` that raises, end
        every leg.
        """
        config = self.runtime.config
        failed: set[Member] = set()
        tries = 1
        for number in itertools.count(1):
            if end := self._already_finished(request):
                await emit(end)
                return
            attempt = await self._attempt(request, number, failed)
            try:
                async with attempt:
                    if number > 1 or not await self._fork(attempt, request, emit):
                        await self._run(attempt, request, emit)
                return
            except NoCapacity as full:
                self.receipt.waits += 1
                deadline = self.arrived + config.queue_timeout_s
                await self.backlog.wait(full, arrived=self.arrived, deadline=deadline)
            except MicroserveError as error:
                if isinstance(error, FINAL) or tries == config.attempts:
                    raise self._for_client(error) from error
                tries += 1
                failed |= attempt.blamed
                self._note_retry(error, attempt, request)
            request = replace(request)  # `tokens` is cached: the output has grown since

    async def _attempt(self, request: Request, number: int, failed: set[Member]) -> Attempt:
        config, registry = self.runtime.config, self.runtime.registry
        members = registry.usable(without=failed)
        if not members:
            # Those that just lost a connection may be well: a moment, not a failure.
            await registry.settled(config.health_timeout_s * config.health_failures)
            members = registry.usable(without=failed)
        if not members:
            raise NoEngines("no engine is up")
        if len(members) == 1:
            self.runtime.metrics.collapsed.inc()
        return Attempt(
            self.runtime,
            self.receipt,
            request_id=EngineRequestId(f"{_ROUTER}-{next(_attempts)}"),
            headers=self.headers,
            choice=request.sampling.choice,
            number=number,
            members=members,
        )

    async def _run(self, attempt: Attempt, request: Request, emit: Emit) -> None:
        # The strategy sees what was emitted before it began, not what it emits.
        given = replace(request, output=list(request.output))
        chunks = self.generation.bound.run(given, Cluster(attempt))
        finished = False
        try:
            while (chunk := await self._next(chunks)) is not None:
                if finished:
                    raise StrategyError(f"strategy {self._name} goes on after the stream's end")
                finished = chunk.finish_reason is not None
                request.output.extend(chunk.token_ids)
                await emit(chunk)
        finally:
            await self._close(chunks)
        if not finished:
            raise StrategyError(f"strategy {self._name} ended before the stream did")

    async def _next(self, chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
        """The strategy's next chunk, `None` at its end; every failure of its own by its name."""
        try:
            chunk = await anext(chunks)
        except StopAsyncIteration:
            return None
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Nobody cancelled us: the strategy awaited something that was.
            raise StrategyError(f"strategy {self._name}: CancelledError") from error
        except MicroserveError:
            raise
        except (Exception, SystemExit) as error:
            cause = root_cause(error)
            if isinstance(cause, MicroserveError):
                raise cause from error
            log.warning("strategy %s failed", self._name, exc_info=error)
            what = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
            raise StrategyError(f"strategy {self._name}: {what}") from error
        if not isinstance(chunk, Chunk):
            raise StrategyError(f"strategy {self._name} yielded no chunk but {chunk!r:.80}")
        return chunk

    async def _close(self, chunks: AsyncGenerator[Chunk, None]) -> None:
        try:
            await chunks.aclose()
        except Exception:  # it was on its way out; what it was left for is what counts
            log.warning("strategy %s failed in its cleanup", self._name, exc_info=True)

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
        begin = len(request.tokens) - 1
        stream = TokenStream(attempt, origin.member, request, begin, None, origin.request_id)
        async for chunk in stream:
            request.output.extend(chunk.token_ids)
            await emit(chunk)
        return True

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
            return StrategyError(f"strategy {self._name}: {error.message}")
        if error.status >= 500 or isinstance(error, BadRequest | TooLarge):
            return error
        return Internal(f"strategy {self._name}: {error.type}: {error.message}", code=error.type)

    def _note_retry(self, error: MicroserveError, attempt: Attempt, request: Request) -> None:
        self.runtime.metrics.retries.labels(error.type).inc()
        self.receipt.retries.append(
            {
                "choice": request.sampling.choice,
                "after_tokens": len(request.output),
                "error": {"type": error.type, "message": error.message},
                "engines": sorted(member.id for member in attempt.blamed),
                "at_ms": self.receipt.elapsed_ms(),
            }
        )

    @property
    def _name(self) -> str:
        return self.generation.bound.strategy.name

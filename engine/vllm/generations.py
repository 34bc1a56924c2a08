"""Generations on vLLM: from `start_generate` to the end of the stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tokenizers import Tokenizer
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input

from engine.execution.released_ids import ReleasedIds
from engine.execution.step_output import StepOutput
from engine.protocol import (
    BadRequest,
    DuplicateRequest,
    Internal,
    KVIncomplete,
    Limits,
    MicroserveError,
    NoCapacity,
    StartGenerate,
    Unsupported,
    generation_begin,
)
from engine.sampling.sampled import Sampled
from engine.scheduling import Generation, generation_of
from engine.service import EngineMetrics, GenerationStream
from engine.vllm.core_client import CoreClient
from engine.vllm.sampling import generation_params
from kvcache.types import SeqId

__all__ = ["Generations"]

log = logging.getLogger(__name__)

FENCE_AFTER_S = 0.05  # a live sender releases the lease within microseconds of its last byte
RETRY_S = 0.002  # while it has not


@dataclass(slots=True, eq=False)
class _Running:
    generation: Generation
    stream: GenerationStream | None = None
    task: asyncio.Task[None] | None = None
    closed: bool = False  # over, or about to be
    waiters: list[asyncio.Future[None]] = field(default_factory=list)


class Generations:
    """The starting and running generations. Lives on one event loop; `tasks` are their parents."""

    def __init__(
        self,
        llm: Any,
        core: CoreClient,
        limits: Limits,
        metrics: EngineMetrics,
        released: ReleasedIds,
        tokenizer: Tokenizer,
        eos: frozenset[int],
        tasks: asyncio.TaskGroup,
        changed: Callable[[], None],
        *,
        most: int,
    ) -> None:
        """Admit at most `most` at a time; `changed` is called when one has ended."""
        self._llm = llm
        self._core = core
        self._limits = limits
        self._metrics = metrics
        self._released = released
        self._tokenizer = tokenizer
        self._eos = eos
        self._tasks = tasks
        self._changed = changed
        self._most = most
        self._numbers = count(1)
        self._starting: set[str] = set()
        self._running: dict[str, _Running] = {}
        self._landed: dict[str, list[asyncio.Future[None]]] = {}  # by lease

    def __len__(self) -> int:
        return len(self._running) + len(self._starting)

    async def start(self, call: StartGenerate) -> GenerationStream:
        """Implement `ServedEngine.start_generate` for an admitted prompt."""
        if call.mirror is not None:
            raise Unsupported("a vLLM engine cannot mirror a generation", param="mirror")
        self._limits.check_sampling(call)
        if call.request_id in self._running or call.request_id in self._starting:
            raise DuplicateRequest(f"{call.request_id} is running", param="request_id")
        if len(self) >= self._most:
            raise NoCapacity(f"{len(self)} requests are running or waiting")
        begin = generation_begin(call)
        generation = generation_of(call, SeqId(next(self._numbers)), self._eos)
        generation_params(call, None)  # refuses what vLLM cannot do, before the lease is used
        start: int | None = None
        self._starting.add(call.request_id)
        try:
            if call.lease_id is not None:
                start, length = await self._take_lease(generation, call.lease_id, begin)
                generation.started, generation.begin, generation.cached = True, length, length
            self._released.check(call.request_id)
            params = generation_params(call, start)
        except BaseException:
            if start is not None:
                self._end_start(start)
            raise
        finally:
            self._starting.discard(call.request_id)
        running = self._running[call.request_id] = _Running(generation)
        stream = GenerationStream(
            generation, self._tokenizer, self._eos, self._metrics, lambda _: self._close(running)
        )
        running.stream = stream
        running.task = self._tasks.create_task(self._run(running, stream, params, start))
        return stream

    async def abort(self, request_id: str) -> None:
        """Abort a generation, and wait until vLLM knows. Idempotent."""
        running = self._running.get(request_id)
        if running is None or running.task is None:
            return
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        running.waiters.append(ended)
        self._close(running)
        await ended

    def fail(self, failure: MicroserveError) -> None:
        """End all generations with an error."""
        for running in tuple(self._running.values()):
            if running.stream is not None and not running.closed:
                running.stream.put(StepOutput(running.generation, failure=failure))
                self._close(running)

    def landed(self, lease_id: str) -> None:
        """Wake the calls that wait for a lease."""
        for waiter in self._landed.pop(lease_id, ()):
            if not waiter.done():
                waiter.set_result(None)

    def _close(self, running: _Running) -> None:
        """Cancel a generation's task, unless it is over."""
        if not running.closed and running.task is not None:
            running.closed = True
            running.task.cancel()

    def _end_start(self, start: int) -> None:
        self._tasks.create_task(self._quietly("end_start", start=start))

    async def _quietly(self, name: str, **body: Any) -> None:
        try:
            await self._core.call(name, **body)
        except MicroserveError as error:
            log.warning("%s: %s", name, error.message)

    async def _take_lease(
        self, generation: Generation, lease_id: str, begin: int | None
    ) -> tuple[int, int]:
        """Turn a lease into a start, once `begin` tokens have landed; return number and length.

        A sender that has written all and does not let go within `FENCE_AFTER_S`, because it is
        stopped, is fenced off. Cancellation leaves the lease as it is.
        """
        landed_at: float | None = None
        while True:
            fence = landed_at is not None and time.monotonic() - landed_at > FENCE_AFTER_S
            body = {"lease_id": lease_id, "tokens": generation.tokens, "begin": begin}
            taking = asyncio.ensure_future(self._core.call("start", **body, fence=fence))
            try:
                reply = await asyncio.shield(taking)
            except asyncio.CancelledError:
                taking.add_done_callback(self._undo_start)
                raise
            except KVIncomplete:
                if landed_at is None:
                    await self._arrival(lease_id, begin or 0)
                    landed_at = time.monotonic()
                await asyncio.sleep(RETRY_S)
            else:
                return int(reply["start"]), int(reply["length"])

    def _undo_start(self, taking: asyncio.Future[dict[str, Any]]) -> None:
        if not taking.cancelled() and taking.exception() is None:
            self._end_start(int(taking.result()["start"]))

    async def _arrival(self, lease_id: str, wanted: int) -> None:
        """Wait until that much has landed in a lease or it has ended."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._landed.setdefault(lease_id, []).append(waiter)
        await self._core.call("await_landed", lease_id=lease_id, wanted=wanted)
        await waiter

    async def _run(
        self, running: _Running, stream: GenerationStream, params: Any, start: int | None
    ) -> None:
        generation = running.generation
        request_id = generation.request_id
        outputs = self._llm.generate(
            tokens_input(list(generation.tokens)),
            params,
            request_id,
            priority=generation.priority,
        )
        try:
            async for output in outputs:
                if self._put(generation, stream, output):
                    running.closed = True  # over: nothing is left to cancel
        except asyncio.CancelledError:
            if not running.closed:  # the engine ends
                raise
        except (VLLMClientError, ValueError) as error:
            structure = generation.sampling.structure
            failure = BadRequest(
                f"vLLM refuses the request: {error}",
                param=structure.param if structure is not None else None,
            )
            stream.put(StepOutput(generation, failure=failure))
        except Exception as error:
            log.exception("%s failed", request_id)
            failure_ = Internal(f"vLLM failed: {error or type(error).__name__}")
            stream.put(StepOutput(generation, failure=failure_))
        finally:
            running.closed = True
            self._running.pop(request_id, None)
            if start is not None:
                self._end_start(start)
            for waiter in running.waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._changed()

    def _put(self, generation: Generation, stream: GenerationStream, output: Any) -> bool:
        """Pass on what one output of vLLM's has; return whether it is the last."""
        completion = output.outputs[0]
        if generation.begin is None:
            generation.begin = generation.cached = output.num_cached_tokens or 0
        finish = completion.finish_reason
        if finish is not None and finish not in ("stop", "length"):
            stream.put(StepOutput(generation, failure=_ended(generation, finish)))
            return True
        tokens: Sequence[int] = completion.token_ids
        if finish is not None and not tokens:
            failure = Internal("vLLM has ended the request without a token")
            stream.put(StepOutput(generation, failure=failure))
            return True
        wanted = generation.sampling.logprobs
        for index, token in enumerate(tokens):
            sampled = Sampled(int(token))
            if wanted is not None and completion.logprobs:
                _add_logprobs(sampled, completion.logprobs[index], wanted)
            generation.tokens.append(sampled.token)
            last = index == len(tokens) - 1
            stream.put(StepOutput(generation, sampled, finish if last else None))
        return finish is not None


def _ended(generation: Generation, finish: str) -> MicroserveError:
    """Return the error of a request that vLLM has broken off."""
    structure = generation.sampling.structure
    if structure is not None:  # it allows nothing, or its matcher has failed: the client's matter
        return BadRequest(
            f"vLLM cannot follow the structure of the output: {finish}", param=structure.param
        )
    return Internal(f"vLLM has ended the request: {finish}")


def _add_logprobs(sampled: Sampled, found: Any, wanted: int) -> None:
    """Add vLLM's log probabilities: those of the token, and of the `wanted` likeliest ones."""
    if sampled.token in found:
        sampled.logprob = float(found[sampled.token].logprob)
    ranked = sorted(found.items(), key=lambda item: item[1].rank or 0)
    sampled.top = [
        (int(token), float(value.logprob))
        for token, value in ranked
        if value.rank is not None and value.rank <= wanted
    ]

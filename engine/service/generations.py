"""The generations of one engine: `start_generate` from its checks to the end of its stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from tokenizers import Tokenizer

from engine.execution.released_ids import ReleasedIds
from engine.execution.step_loop import StepLoop
from engine.execution.step_output import StepOutput
from engine.protocol import (
    BadRequest,
    DuplicateRequest,
    Internal,
    Limits,
    MicroserveError,
    MirrorGeneration,
    NoCapacity,
    StartGenerate,
    generation_begin,
)
from engine.scheduling import Generation, generation_of, queued_tokens
from engine.service.generation_stream import GenerationStream
from engine.service.kv_arrival import KVArrivals
from engine.service.metrics import EngineMetrics
from engine.service.mirror_tasks import MirrorTasks
from engine.service.promotion import promote
from engine.text import Grammars
from kvcache.cache import KVCache
from kvcache.types import LeaseId, SeqId

__all__ = ["Generations"]


class Generations:
    """The starting, waiting and running generations. Lives on one asyncio event loop."""

    def __init__(
        self,
        cache: KVCache,
        limits: Limits,
        metrics: EngineMetrics,
        mirrors: MirrorTasks,
        seq_ids: Iterator[SeqId],
        released: ReleasedIds,
        tokenizer: Tokenizer,
        eos: frozenset[int],
        grammars: Grammars,
        *,
        most: int,
        borrows: bool = False,
    ) -> None:
        """Admit at most `most` at a time; `seq_ids` is shared with the sends.

        `borrows`: sequences may exceed the pool.
        """
        self._borrows = borrows
        self._cache = cache
        self._limits = limits
        self._metrics = metrics
        self._mirrors = mirrors
        self._seq_ids = seq_ids
        self._released = released
        self._tokenizer = tokenizer
        self._eos = eos
        self._grammars = grammars
        self._most = most
        self._arrivals = KVArrivals(cache)
        self._starting: set[str] = set()  # request ids; they wait for KV, a grammar or a promotion
        self._by_id: dict[str, Generation] = {}
        self._streams: dict[Generation, GenerationStream] = {}

    def __len__(self) -> int:
        """The number of generations that have a stream."""
        return len(self._streams)

    @property
    def queued_tokens(self) -> int:
        """Tokens that generations without a first token have to compute."""
        return queued_tokens(self._streams)

    @property
    def starting(self) -> Sequence[str]:
        """The request ids of generations that have no stream yet."""
        return tuple(self._starting)

    async def start(self, call: StartGenerate, loop: StepLoop) -> GenerationStream:
        """Implement `MicroserveEngine.start_generate` for an admitted prompt."""
        self._limits.check_sampling(call)
        if call.request_id in self._by_id or call.request_id in self._starting:
            raise DuplicateRequest(f"{call.request_id} is running", param="request_id")
        if len(self._by_id) + len(self._starting) >= self._most:
            raise NoCapacity(f"{len(self._by_id)} requests are running or waiting")
        begin = generation_begin(call)
        if call.lease_id is None and not self._borrows:
            self._cache.check_room(call.prompt + call.output)
        generation = generation_of(call, next(self._seq_ids), self._eos)
        tokens = generation.tokens
        if call.mirror is not None:
            self._cache.check_address(call.mirror.kv_addr, tokens)
        self._starting.add(call.request_id)
        try:
            if call.structure is not None:
                generation.matcher = await self._grammars.matcher(call.structure, call.output)
                self._released.check(call.request_id)
            if call.lease_id is not None:
                await self._arrivals.start(generation, LeaseId(call.lease_id), begin)
            elif await promote(self._cache, tokens[:-1]):
                self._released.check(call.request_id)
        finally:
            self._starting.discard(call.request_id)
        stream = GenerationStream(
            generation, self._tokenizer, self._eos, self._metrics, partial(self._forget, loop)
        )
        if call.mirror is not None:
            generation.mirror = self._mirrors.start(generation, call.mirror)
        self._by_id[call.request_id] = generation
        self._streams[generation] = stream
        try:
            loop.submit(generation)
        except Internal:  # the loop has stopped
            stream.close()
            if generation.started:
                self._cache.remove_sequence(generation.seq_id)
            raise
        return stream

    def mirror(self, call: MirrorGeneration, loop: StepLoop) -> None:
        """Mirror a running generation; a new mirror replaces the one it has.

        Raises `BadRequest` for an unknown request id, and `BadAddress`.
        """
        generation = self._by_id.get(call.request_id)
        if generation is None:
            raise BadRequest(f"no generation {call.request_id}", param="request_id")
        mirror = self._mirrors.start(generation, call)
        if generation.mirror is not None:
            generation.mirror.end()
        generation.mirror = mirror
        loop.advance_mirror(generation)

    def dispatch(self, outputs: Sequence[StepOutput]) -> None:
        """Pass the outputs of one step to their streams."""
        for output in outputs:
            stream = self._streams.get(output.generation)
            if stream is not None:
                stream.put(output)

    def fail(self, failure: MicroserveError) -> None:
        """End all streams with `failure`."""
        for generation, stream in list(self._streams.items()):  # each removes itself
            stream.put(StepOutput(generation, failure=failure))

    def abort(self, request_id: str, loop: StepLoop) -> None:
        """Abort a generation, if there is one; its stream fails."""
        generation = self._by_id.get(request_id)
        if generation is None:
            return
        loop.abort(generation)
        stream = self._streams.get(generation)
        if stream is not None:
            stream.put(StepOutput(generation, failure=MicroserveError("the request was released")))

    def _forget(self, loop: StepLoop, generation: Generation) -> None:
        """Drop a generation whose stream has ended, and abort it if it still runs."""
        if self._streams.pop(generation, None) is not None:
            del self._by_id[generation.request_id]
            loop.abort(generation)
            if generation.mirror is not None:
                generation.mirror.end()  # the loop would do it, but it may have stopped

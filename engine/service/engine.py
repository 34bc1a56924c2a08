"""The engine's calls, as async functions: what they check, wait for, and undo.

Every call ends in one of three ways: it returns, it raises one of the tree in `kvcache.errors`, or
it is cancelled (the caller went away); after the last two nothing of it is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

from tokenizers import Tokenizer

from engine.api.metrics import EngineMetrics
from engine.execution.step_loop import Drawn, StepLoop
from engine.models import LoadedModel
from engine.protocol import (
    BadRange,
    BadRequest,
    Draining,
    DuplicateRequest,
    Extend,
    ExtendReply,
    Internal,
    LeaseExpired,
    MicroserveError,
    MirrorGeneration,
    NoCapacity,
    Pin,
    PrepRecv,
    PrepRecvReply,
    Release,
    RemoteSend,
    RemoteSendReply,
    StartGenerate,
    UnknownLease,
)
from engine.scheduling.jobs import Generation
from engine.scheduling.scheduler import Scheduler
from engine.service.event_mux import EventMuxes
from engine.service.generation_stream import GenerationStream
from engine.service.kv_arrival import KVArrivals
from engine.service.limits import Limits, resolve
from engine.service.mirrors import Mirrors
from engine.service.prefix_feed import PrefixFeed
from engine.service.recall import recall
from engine.service.sends import Sends
from engine.text.grammar import Grammars
from kvcache.cache import KVCache
from kvcache.types import LeaseId, SeqId

__all__ = ["MicroserveEngine"]

LET_GO_S = 1.0
REMEMBERED = 16_384  # request ids that were released; one takes about 100 bytes


class MicroserveEngine:
    """One engine's microserving calls (the microserving paper, Table 1), over cache and step loop.

    Lives on one asyncio event loop; `deliver` and `died` are the step loop's callbacks.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        *,
        max_live: int,
        lease_ms: int,
        mirrors: Mirrors | None = None,
    ) -> None:
        """At most `max_live` generations, and as many sends, run or wait at a time."""
        self.model = model
        self.cache = cache
        self.metrics = metrics
        self.tokenizer: Tokenizer = Tokenizer.from_str(model.tokenizer_json)
        self.eos = frozenset(model.eos_token_ids)
        self.draining = False
        self.mirrors = mirrors or Mirrors(cache, metrics)
        self.loop: StepLoop
        self._scheduler = scheduler
        self._limits = Limits(model.config, cache.page_use().total * cache.layout.page_size)
        self._max_live = max_live
        self._lease_ms = lease_ms
        self._seq_ids = (SeqId(number) for number in count(1))
        self._generations: dict[str, Generation] = {}
        self._starting: set[str] = set()  # generations that wait for their KV to land
        self._streams: dict[Generation, GenerationStream] = {}
        self.muxes = EventMuxes()
        self.prefixes = PrefixFeed(cache)
        self._landings = KVArrivals(cache)
        self._sends = Sends(cache, self._limits, metrics, self._seq_ids, most=max_live)
        self._grammars = Grammars(self.tokenizer, model.config.vocab_size, self.eos)
        self._released: dict[str, None] = {}  # request ids, the latest last
        self._asyncio = asyncio.get_running_loop()

    # Callbacks of the step loop, on its thread

    def deliver(self, drawn: list[Drawn]) -> None:
        """Hand what a step drew to the streams: one wake-up of the event loop a step."""
        if drawn:
            self._asyncio.call_soon_threadsafe(self._dispatch, drawn)

    def died(self) -> None:
        """The step loop is gone: everything that waits for it fails."""
        self._asyncio.call_soon_threadsafe(self._fail_all)

    def _dispatch(self, drawn: list[Drawn]) -> None:
        for item in drawn:
            stream = self._streams.get(item.generation)
            if stream is not None:
                stream.put(item)

    def _fail_all(self) -> None:
        gone = Internal("the engine's step loop has stopped")
        for generation, stream in list(self._streams.items()):  # each takes itself out
            stream.put(Drawn(generation, failure=gone))
        self._sends.fail(gone)

    def shut_down(self) -> None:
        """Take nothing new and end what runs, each with an error: the process is about to exit."""
        self.draining = True
        for generation, stream in list(self._streams.items()):
            stream.put(Drawn(generation, failure=Draining("this engine shuts down")))
        for request_id in {*self._starting, *self._sends}:
            self.release(Release(request_id=request_id))
        self.muxes.end()
        self.prefixes.end()

    # The calls

    async def recall(self, prompt: Sequence[int]) -> None:
        """Bring back what tiers have of a prompt, for the `prep_recv` that follows to match."""
        self._admit(prompt)
        await recall(self.cache, prompt)

    def prep_recv(self, call: PrepRecv) -> PrepRecvReply:
        """Match `prompt[:end]`, take pages for the rest, and say where to put it."""
        self._admit(call.prompt)
        self._check_not_released(call.request_id)
        end = resolve(call.end, len(call.prompt), "end")
        if any(lease.request_id == call.request_id for lease in self.cache.leases()):
            raise DuplicateRequest(f"{call.request_id} has a lease", param="request_id")
        lease_s = (call.lease_ms or self._lease_ms) / 1000
        lease, address = self.cache.prep_recv(
            call.request_id, call.prompt, end, call.reserve, lease_s
        )
        self.metrics.prefix(end, lease.begin)
        return PrepRecvReply(
            lease_id=lease.lease_id,
            kv_addr=address,
            match_len=lease.begin,
            end=end,
            expires_ms=round(lease_s * 1000),
        )

    async def remote_send(self, call: RemoteSend) -> RemoteSendReply:
        """Put the KV of `prompt[begin:end]`, from the prefix cache or computed, layer by layer.

        Returns after the last byte has landed. Cancelled, it stops sending; pages that are being
        written from stay held until the write is over.
        """
        self._limits.check_prompt(call.prompt)
        self._check_not_released(call.request_id)
        return await self._sends.run(call, self.loop)

    def may_wait(self, call: StartGenerate) -> bool:
        """Whether `start_generate` may have something to wait for: its caller may leave."""
        tiered = any(True for _ in self.cache.tiers)
        return tiered or call.lease_id is not None or call.structure is not None

    async def start_generate(self, call: StartGenerate) -> GenerationStream:
        """Take a generation on; its events come from the stream that is returned.

        With a lease, waits until `prompt[:begin]` has landed or the lease ends. With a mirror, its
        address must be a good one; whatever else is wrong with it only stops the mirror.
        """
        self._admit(call.prompt)
        self._check_not_released(call.request_id)
        self._limits.check_sampling(call)
        if call.request_id in self._generations or call.request_id in self._starting:
            raise DuplicateRequest(f"{call.request_id} is running", param="request_id")
        if len(self._generations) + len(self._starting) >= self._max_live:
            raise NoCapacity(f"{len(self._generations)} requests are running or waiting")
        tokens = call.prompt + call.output
        begin = None
        if call.begin is not None:
            begin = resolve(call.begin, len(tokens), "begin")
            if begin == len(tokens):
                raise BadRange("begin must leave a token to compute", param="begin")
        generation = Generation(
            request_id=call.request_id,
            seq_id=next(self._seq_ids),
            tokens=tokens,
            prompt_len=len(call.prompt),
            sampling=call,
            stop_ids=frozenset(call.stop_token_ids)
            | (frozenset() if call.ignore_eos else self.eos),
            forks=call.forks,
            fork_of=call.fork_of,
            priority=call.priority,
        )
        if call.mirror is not None:
            self.cache.check_address(call.mirror.kv_addr, tokens)
        self._starting.add(call.request_id)
        try:
            if call.structure is not None:
                generation.matcher = await self._grammars.matcher(call.structure, call.output)
                self._check_not_released(call.request_id)
            if call.lease_id is not None:
                await self._landings.start(generation, LeaseId(call.lease_id), begin)
            elif await recall(self.cache, tokens[:-1]):
                self._check_not_released(call.request_id)
        finally:
            self._starting.discard(call.request_id)
        stream = GenerationStream(generation, self.tokenizer, self.eos, self.metrics, self.forget)
        if call.mirror is not None:
            generation.mirror = self.mirrors.start(generation, call.mirror)
        self._generations[call.request_id] = generation
        self._streams[generation] = stream
        self.loop.submit(generation)
        return stream

    def mirror(self, call: MirrorGeneration) -> None:
        """Mirror a generation that runs, to another lease than before if it had one."""
        generation = self._generations.get(call.request_id)
        if generation is None:
            raise BadRequest(f"no generation {call.request_id}", param="request_id")
        mirroring = self.mirrors.start(generation, call)
        if generation.mirror is not None:
            generation.mirror.end()
        generation.mirror = mirroring
        self.loop.mirror(generation)

    def extend(self, call: Extend) -> ExtendReply:
        """More room in a lease of ours, for an engine that mirrors into it."""
        lease, address = self.cache.extend(call.kv_addr, call.reserve)
        return ExtendReply(kv_addr=address, room=lease.room)

    def commit(self, lease_id: str) -> int:
        """Publish a landed lease to the prefix cache; returns the tokens that it has now."""
        return self.cache.commit(LeaseId(lease_id))

    def pin(self, call: Pin) -> int:
        """Keep what is cached of `prompt` from eviction; returns the tokens that are."""
        self._limits.check_prompt(call.prompt)
        return self.cache.pin(call.prompt)

    def unpin(self, call: Pin) -> int:
        """Keep it no longer; returns the tokens that were kept. Idempotent."""
        self._limits.check_prompt(call.prompt)
        return self.cache.unpin(call.prompt)

    def release(self, call: Release) -> None:
        """End a lease, or all that runs under a request id. Idempotent.

        A request id that was released is used up: what a caller who has gone away had sent before
        may arrive after its release, on another connection, and must not begin then.
        """
        if (call.lease_id is None) == (call.request_id is None):
            raise BadRequest("give either lease_id or request_id", param="lease_id")
        ids = [LeaseId(call.lease_id)] if call.lease_id is not None else []
        if call.request_id is not None:
            self._released.pop(call.request_id, None)
            self._released[call.request_id] = None
            if len(self._released) > REMEMBERED:
                del self._released[next(iter(self._released))]
            ids = [
                lease.lease_id
                for lease in self.cache.leases()
                if lease.request_id == call.request_id
            ]
            generation = self._generations.get(call.request_id)
            if generation is not None:
                self._abort(generation)
            self._sends.abort(call.request_id, self.loop)
        for lease_id in ids:
            try:
                self.cache.release(lease_id)
            except (LeaseExpired, UnknownLease):
                continue

    async def let_go(self) -> None:
        """Wait until the step loop has done what was asked of it, a long step's time at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LET_GO_S):
                await asyncio.wrap_future(self.loop.turn())

    def forget(self, generation: Generation) -> None:
        """A stream has ended, by itself or not."""
        if self._streams.pop(generation, None) is not None:
            del self._generations[generation.request_id]
            self.loop.abort(generation)
            if generation.mirror is not None:
                generation.mirror.end()  # also where the loop is gone

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        return len(self._scheduler.waiting) + self.loop.forks.waiting + len(self._starting)

    @property
    def preemptions(self) -> int:
        return self._scheduler.preemptions

    @property
    def puts_in_flight(self) -> int:
        return len(self._sends)

    # Checks

    def _admit(self, prompt: Sequence[int]) -> None:
        if self.draining:
            raise Draining("this engine is draining")
        self._limits.check_prompt(prompt)

    def _check_not_released(self, request_id: str) -> None:
        if request_id in self._released:
            raise DuplicateRequest(f"{request_id} has been released", param="request_id")

    # Parts of the calls

    def _abort(self, generation: Generation) -> None:
        self.loop.abort(generation)
        stream = self._streams.get(generation)
        if stream is not None:
            stream.put(Drawn(generation, failure=MicroserveError("the request was released")))

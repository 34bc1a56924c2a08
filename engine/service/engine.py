"""The engine's calls as async functions: their checks, their waits and their cleanup.

A call returns, raises an error of the tree in `kvcache.errors`, or is cancelled because its caller
has gone away. After an error or a cancellation nothing of the call remains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count

from tokenizers import Tokenizer

from engine.execution.released_ids import ReleasedIds
from engine.execution.step_loop import StepLoop
from engine.execution.step_output import StepOutput
from engine.models import LoadedModel
from engine.protocol import (
    BadRequest,
    Draining,
    DuplicateRequest,
    Extend,
    ExtendReply,
    Internal,
    LeaseExpired,
    Limits,
    MirrorGeneration,
    Pin,
    PrepRecv,
    PrepRecvReply,
    Release,
    RemoteSend,
    RemoteSendReply,
    StartGenerate,
    UnknownLease,
    WorkerState,
    resolve_position,
)
from engine.scheduling import Scheduler
from engine.service.borrowing import Borrowing
from engine.service.event_mux import EventMuxes
from engine.service.generation_stream import GenerationStream
from engine.service.generations import Generations
from engine.service.metrics import EngineMetrics
from engine.service.mirror_tasks import MirrorTasks
from engine.service.prefix_feed import PrefixFeed
from engine.service.promotion import promote
from engine.service.sends import Sends
from engine.text import Grammars
from kvcache.cache import KVCache
from kvcache.remote_attention import Creditor
from kvcache.types import LeaseId, SeqId

__all__ = ["MicroserveEngine"]

FLUSH_TIMEOUT_S = 1.0


class MicroserveEngine:
    """One engine's microserving calls (the microserving paper, Table 1), over cache and step loop.

    Lives on one asyncio event loop. `deliver` and `died` are callbacks for the step loop, which is
    assigned to `loop` before the first call.
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
        context: int | None = None,
        mirrors: MirrorTasks | None = None,
        workers: Callable[[], list[WorkerState]] = list,
        creditor: Creditor | None = None,
        borrowing: Borrowing | None = None,
    ) -> None:
        """Admit at most `max_live` generations, and as many sends, at a time.

        `context` is the longest context to serve, in tokens; by default the model's. `workers`
        describes the processes of an engine that is split. `creditor` answers queries over pages
        that this engine has lent. With `borrowing` a generation may exceed the pool.
        """
        self.workers = workers
        self.model = model
        self.cache = cache
        self.metrics = metrics
        self.tokenizer: Tokenizer = Tokenizer.from_str(model.tokenizer_json)
        self.draining = False
        self.mirrors = mirrors or MirrorTasks(cache, metrics)
        self.muxes = EventMuxes()
        self.prefixes = PrefixFeed(cache)
        self.loop: StepLoop
        self._scheduler = scheduler
        context, room = context or model.config.context_length, cache.total_pages * cache.page_size
        reach = context if borrowing is not None else min(context, room)
        self.context_length = reach  # what a request can have, prompt and output
        self.creditor, self.borrowing = creditor, borrowing
        self._limits = Limits(model.config.vocab_size, context, room, reach=reach)
        self._lease_ms = lease_ms
        self._released = ReleasedIds()
        eos = frozenset(model.eos_token_ids)
        seq_ids = (SeqId(number) for number in count(1))
        self.generations = Generations(
            cache,
            self._limits,
            metrics,
            self.mirrors,
            seq_ids,
            self._released,
            self.tokenizer,
            eos,
            Grammars(self.tokenizer, model.config.vocab_size, eos),
            most=max_live,
            borrows=borrowing is not None,
        )
        self.sends = Sends(cache, self._limits, metrics, seq_ids, most=max_live)
        self._asyncio = asyncio.get_running_loop()

    # Callbacks of the step loop, on its thread

    def deliver(self, outputs: list[StepOutput]) -> None:
        """Pass a step's outputs to the streams, with one wake-up of the event loop per step."""
        if outputs:
            self._asyncio.call_soon_threadsafe(self.generations.dispatch, outputs)

    def died(self) -> None:
        """Fail all running calls: the step loop has stopped."""
        self._asyncio.call_soon_threadsafe(self._fail_all)

    def _fail_all(self) -> None:
        failure = Internal("the engine's step loop has stopped")
        self.generations.fail(failure)
        self.sends.fail(failure)

    @property
    def idle(self) -> bool:
        """Whether no generation, send or receive is under way."""
        return not (self.running or self.waiting or self.puts_in_flight or self.cache.leases())

    def shut_down(self) -> None:
        """Refuse new calls and end running ones with an error, before the process exits."""
        self.draining = True
        self.generations.fail(Draining("this engine shuts down"))
        for request_id in {*self.generations.starting, *self.sends}:
            self.release(Release(request_id=request_id))
        self.muxes.end()
        self.prefixes.end()

    def close(self) -> None:
        """Close the cache, and what this engine lends and borrows. Waits for seconds at most.

        Call it when the step loop has ended.
        """
        if self.creditor is not None:  # it reads the pool
            self.creditor.close()
        self.cache.close()
        if self.borrowing is not None:  # the cache writes into borrowed pages
            self.borrowing.close()

    # The calls

    async def promote(self, prompt: Sequence[int]) -> None:
        """Bring a prompt's KV back from the tiers, so that the next `prep_recv` matches it."""
        self._admit(prompt)
        await promote(self.cache, prompt)

    def prep_recv(self, call: PrepRecv) -> PrepRecvReply:
        """Match `prompt[:end]`, allocate pages for the rest, and return where to put it."""
        self._admit(call.prompt)
        self._released.check(call.request_id)
        end = resolve_position(call.end, len(call.prompt), "end")
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

        Returns after the last byte has landed. Cancellation stops the send; pages that a write
        still reads stay held until the write ends.
        """
        self._limits.check_prompt(call.prompt)
        self._released.check(call.request_id)
        return await self.sends.run(call, self.loop)

    def may_wait(self, call: StartGenerate) -> bool:
        """Whether `start_generate` may wait for a lease, a grammar or a tier.

        Its caller may disconnect meanwhile.
        """
        tiered = any(True for _ in self.cache.tiers)
        return tiered or call.lease_id is not None or call.structure is not None

    async def start_generate(self, call: StartGenerate) -> GenerationStream:
        """Start a generation and return the stream of its events.

        With a lease, waits until `prompt[:begin]` has landed or the lease ends. A malformed mirror
        address raises `BadAddress`; any later failure of the mirror stops only the mirror.
        """
        self._admit(call.prompt)
        self._released.check(call.request_id)
        return await self.generations.start(call, self.loop)

    def mirror(self, call: MirrorGeneration) -> None:
        """Mirror a running generation; a new mirror replaces the one it has.

        Raises `BadRequest` for an unknown request id, and `BadAddress`.
        """
        self.generations.mirror(call, self.loop)

    def extend(self, call: Extend) -> ExtendReply:
        """Make more room in a lease of this engine, for a peer that mirrors into it."""
        lease, address = self.cache.extend(call.kv_addr, call.reserve)
        return ExtendReply(kv_addr=address, room=lease.room)

    def commit(self, lease_id: str) -> int:
        """Publish a landed lease to the prefix cache; return its number of tokens."""
        return self.cache.commit(LeaseId(lease_id))

    def pin(self, call: Pin) -> int:
        """Protect the cached part of `prompt` from eviction; return its number of tokens."""
        self._limits.check_prompt(call.prompt)
        return self.cache.pin(call.prompt)

    def unpin(self, call: Pin) -> int:
        """End that protection; return the number of tokens that had it. Idempotent."""
        self._limits.check_prompt(call.prompt)
        return self.cache.unpin(call.prompt)

    def release(self, call: Release) -> None:
        """End a lease, or everything that runs under a request id. Idempotent.

        A released request id cannot be used again: calls that its client sent earlier may arrive
        later, on another connection, and must not start.
        """
        if (call.lease_id is None) == (call.request_id is None):
            raise BadRequest("give either lease_id or request_id", param="lease_id")
        ids = [LeaseId(call.lease_id)] if call.lease_id is not None else []
        if call.request_id is not None:
            self._released.add(call.request_id)
            ids = [
                lease.lease_id
                for lease in self.cache.leases()
                if lease.request_id == call.request_id
            ]
            self.generations.abort(call.request_id, self.loop)
            self.sends.abort(call.request_id, self.loop)
        for lease_id in ids:
            try:
                self.cache.release(lease_id)
            except (LeaseExpired, UnknownLease):
                continue

    async def flush(self) -> None:
        """Wait until earlier aborts have taken effect, at most `FLUSH_TIMEOUT_S`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await asyncio.wrap_future(self.loop.flush())

    # State

    @property
    def running(self) -> int:
        """Generations in the batch."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Generations that wait: for room, for a shared prompt, or to start."""
        parallel_sampling = self.loop.stepper.parallel_sampling
        starting = len(self.generations.starting)
        return len(self._scheduler.waiting) + parallel_sampling.waiting + starting

    @property
    def preemptions(self) -> int:
        """Preemptions since the start."""
        return self._scheduler.preemptions

    @property
    def puts_in_flight(self) -> int:
        """Sends that run or wait."""
        return len(self.sends)

    def _admit(self, prompt: Sequence[int]) -> None:
        if self.draining:
            raise Draining("this engine is draining")
        self._limits.check_prompt(prompt)

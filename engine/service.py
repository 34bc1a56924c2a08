"""The engine's calls, as async functions: what they check, wait for, and undo.

Every call ends in one of three ways: it returns, it raises one of the tree in `kvcache.errors`, or
it is cancelled (the caller went away); after the last two nothing of it is left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from itertools import count

from tokenizers import Tokenizer

from engine.detokenizer import Detokenizer, Released, token_bytes
from engine.job import Generation, Job, Sampled, Send
from engine.loop import Drawn, StepLoop
from engine.metrics import EngineMetrics
from engine.models import LoadedModel
from engine.protocol import (
    BadRange,
    BadRequest,
    Draining,
    DuplicateRequest,
    Event,
    Internal,
    KVIncomplete,
    LeaseExpired,
    MicroserveError,
    NoCapacity,
    Pin,
    PrepRecv,
    PrepRecvReply,
    Release,
    RemoteSend,
    RemoteSendReply,
    StartGenerate,
    TokenLogprob,
    UnknownLease,
    Usage,
)
from engine.scheduler import Scheduler
from kvcache.cache import KVCache
from kvcache.transport import Put
from kvcache.types import LeaseId, SeqId

__all__ = ["GenerationStream", "MicroserveEngine"]

LANDING_POLL_S = 0.001  # how often a waiting start_generate looks at its watermark
FENCE_AFTER_S = 0.05  # a live sender lets go within microseconds of its last byte


class GenerationStream:
    """The events of one generation. Iterate to its end, or `close` it, which aborts."""

    def __init__(
        self, engine: MicroserveEngine, generation: Generation, detokenizer: Detokenizer
    ) -> None:
        self._engine = engine
        self._generation = generation
        self._detokenizer = detokenizer
        self._drawn: asyncio.Queue[Drawn] = asyncio.Queue()
        self._arrived = time.monotonic()
        self._completion = len(generation.output)  # what was delivered; the loop may be ahead

    def put(self, drawn: Drawn) -> None:
        """Take over what a step drew for this generation."""
        self._drawn.put_nowait(drawn)

    async def events(self) -> AsyncIterator[Event]:
        """One event for each step that released tokens; the last has a `finish_reason`.

        Raises the failure that ended the generation. Leaving early aborts it.
        """
        previous, first_token, first_event = self._arrived, True, True
        try:
            while True:
                drawn = await self._drawn.get()
                if drawn.failure is not None:
                    raise drawn.failure
                if drawn.sampled is None:
                    raise Internal("a step delivered nothing")
                now = time.monotonic()
                self._engine.metrics.token(now - previous, first=first_token)
                previous, first_token = now, False
                self._completion += 1
                released = self._detokenizer.push(drawn.sampled, last=drawn.finish is not None)
                done = drawn.finish is not None or released.stopped is not None
                if not done and not released.sampled:
                    continue
                event = self._event(drawn, released)
                if first_event:
                    event.begin, first_event = self._generation.begin, False
                yield event
                if done:
                    return
        finally:
            self.close()

    def close(self) -> None:
        """Abort the generation, if it still runs. Idempotent."""
        self._engine.forget(self._generation)

    def _event(self, drawn: Drawn, released: Released) -> Event:
        generation = self._generation
        event = Event(token_ids=[sampled.token for sampled in released.sampled], text=released.text)
        if generation.sampling.logprobs is not None:
            event.logprobs = [self._engine.logprob(sampled) for sampled in released.sampled]
        if released.stopped is not None:
            event.finish_reason, event.stop_reason = "stop", released.stopped
        elif drawn.finish is not None and drawn.sampled is not None:
            event.finish_reason = drawn.finish
            if drawn.finish == "stop" and drawn.sampled.token not in self._engine.eos:
                event.stop_reason = drawn.sampled.token
        if event.finish_reason is not None:
            event.usage = Usage(
                prompt_tokens=generation.prompt_len,
                completion_tokens=self._completion,
                cached_tokens=min(generation.cached, generation.prompt_len),
            )
        return event


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
    ) -> None:
        """At most `max_live` generations, and as many sends, run or wait at a time."""
        self.model = model
        self.cache = cache
        self.metrics = metrics
        self.tokenizer: Tokenizer = Tokenizer.from_str(model.tokenizer_json)
        self.eos = frozenset(model.eos_token_ids)
        self.draining = False
        self.loop: StepLoop
        self._scheduler = scheduler
        self._max_live = max_live
        self._lease_ms = lease_ms
        self._seq_ids = (SeqId(number) for number in count(1))
        self._generations: dict[str, Generation] = {}
        self._starting: set[str] = set()  # generations that wait for their KV to land
        self._streams: dict[Generation, GenerationStream] = {}
        self._sends: dict[str, Send | None] = {}  # None: its lease is being claimed
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
        for generation, stream in self._streams.items():
            stream.put(Drawn(generation, failure=gone))
        for send in self._sends.values():
            if send is not None and not send.done.done():
                send.done.set_exception(gone)

    def shut_down(self) -> None:
        """Take nothing new and end what runs, each with an error: the process is about to exit."""
        self.draining = True
        for generation, stream in self._streams.items():
            stream.put(Drawn(generation, failure=Draining("this engine shuts down")))
        for request_id in {*self._starting, *self._sends}:
            self.release(Release(request_id=request_id))

    # The calls

    def prep_recv(self, call: PrepRecv) -> PrepRecvReply:
        """Match `prompt[:end]`, take pages for the rest, and say where to put it."""
        self._admit(call.prompt)
        end = _resolve(call.end, len(call.prompt), "end")
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
        self._check_prompt(call.prompt)
        begin = _resolve(call.begin, len(call.prompt), "begin")
        end = _resolve(call.end, len(call.prompt), "end")
        if begin >= end:
            raise BadRange(f"begin {begin} is not below end {end}", param="begin")
        if call.request_id in self._sends:
            raise DuplicateRequest(f"a send of {call.request_id} is running", param="request_id")
        if len(self._sends) >= self._max_live:
            raise NoCapacity(f"{len(self._sends)} sends are running")
        self._sends[call.request_id] = None
        try:
            # Claiming may wait for the peer's write right, so it is done off the event loop.
            put = await asyncio.to_thread(
                self.cache.open_put, call.kv_addr, call.prompt, begin, end
            )
            if call.request_id not in self._sends:
                raise Internal("the send was aborted")
            send = self._sends[call.request_id] = self._reserve(call, begin, end, put)
            self.loop.submit(send)
            try:
                reply = await asyncio.shield(asyncio.wrap_future(send.done))
            except BaseException:
                self.loop.abort(send)
                raise
        finally:
            self._sends.pop(call.request_id, None)
        self.metrics.sent(reply)
        return reply

    async def start_generate(self, call: StartGenerate) -> GenerationStream:
        """Take a generation on; its events come from the stream that is returned.

        With a lease, waits until `prompt[:begin]` has landed or the lease ends.
        """
        self._admit(call.prompt)
        self._check_sampling(call)
        if call.request_id in self._generations or call.request_id in self._starting:
            raise DuplicateRequest(f"{call.request_id} is running", param="request_id")
        if len(self._generations) + len(self._starting) >= self._max_live:
            raise NoCapacity(f"{len(self._generations)} requests are running or waiting")
        tokens = call.prompt + call.output
        begin = None
        if call.begin is not None:
            begin = _resolve(call.begin, len(tokens), "begin")
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
        )
        if call.lease_id is not None:
            self._starting.add(call.request_id)
            try:
                await self._start_lease(generation, LeaseId(call.lease_id), begin)
            finally:
                self._starting.discard(call.request_id)
        detokenizer = Detokenizer(
            self.tokenizer,
            tokens,
            stop=call.stop,
            include_stop=call.include_stop_str_in_output,
            skip_special_tokens=call.skip_special_tokens,
        )
        stream = GenerationStream(self, generation, detokenizer)
        self._generations[call.request_id] = generation
        self._streams[generation] = stream
        self.loop.submit(generation)
        return stream

    def commit(self, lease_id: str) -> int:
        """Publish a landed lease to the prefix cache; returns the tokens that it has now."""
        return self.cache.commit(LeaseId(lease_id))

    def pin(self, call: Pin) -> int:
        """Keep what is cached of `prompt` from eviction; returns the tokens that are."""
        self._check_prompt(call.prompt)
        return self.cache.pin(call.prompt)

    def unpin(self, call: Pin) -> int:
        """Keep it no longer; returns the tokens that were kept. Idempotent."""
        self._check_prompt(call.prompt)
        return self.cache.unpin(call.prompt)

    def release(self, call: Release) -> None:
        """End a lease, or all that runs under a request id. Idempotent."""
        if (call.lease_id is None) == (call.request_id is None):
            raise BadRequest("give either lease_id or request_id", param="lease_id")
        ids = [LeaseId(call.lease_id)] if call.lease_id is not None else []
        if call.request_id is not None:
            ids = [
                lease.lease_id
                for lease in self.cache.leases()
                if lease.request_id == call.request_id
            ]
            running: list[Job | None] = [
                self._generations.get(call.request_id),
                self._sends.get(call.request_id),
            ]
            for job in running:
                if job is not None:
                    self._abort(job)
            if self._sends.get(call.request_id, 0) is None:  # it finds out when it has its claim
                del self._sends[call.request_id]
        for lease_id in ids:
            try:
                self.cache.release(lease_id)
            except (LeaseExpired, UnknownLease):
                continue

    def forget(self, generation: Generation) -> None:
        """A stream has ended, by itself or not."""
        if self._streams.pop(generation, None) is not None:
            del self._generations[generation.request_id]
            self.loop.abort(generation)

    def logprob(self, sampled: Sampled) -> TokenLogprob:
        """A drawn token's log probability in its wire form."""

        def item(token: int, logprob: float) -> TokenLogprob:
            text, raw = token_bytes(self.tokenizer, token)
            return TokenLogprob(token_id=token, token=text, bytes=raw, logprob=logprob)

        chosen = item(sampled.token, sampled.logprob or 0.0)
        chosen.top = [item(token, logprob) for token, logprob in sampled.top]
        return chosen

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        return len(self._scheduler.waiting) + len(self._starting)

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
        self._check_prompt(prompt)

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        config = self.model.config
        if not prompt:
            raise BadRequest("the prompt is empty", param="prompt")
        if len(prompt) > config.context_length:
            raise BadRequest(
                f"{len(prompt)} tokens exceed the context of {config.context_length}",
                param="prompt",
                code="context_length_exceeded",
            )
        if max(prompt) >= config.vocab_size:
            raise BadRequest(
                f"token {max(prompt)} is outside the vocabulary of {config.vocab_size}",
                param="prompt",
            )

    def _check_sampling(self, call: StartGenerate) -> None:
        config = self.model.config
        total = len(call.prompt) + call.max_tokens
        if total > config.context_length:
            raise BadRequest(
                f"{len(call.prompt)} prompt tokens and {call.max_tokens} more exceed the context "
                f"of {config.context_length}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if self.cache.layout.pages_for(total) > self.cache.page_use().total:
            raise BadRequest(f"{total} tokens exceed this engine's KV pool", param="max_tokens")
        if len(call.output) >= call.max_tokens:
            raise BadRequest("output has max_tokens already", param="output")
        for name, ids in (
            ("output", call.output),
            ("stop_token_ids", call.stop_token_ids),
            ("logit_bias", call.logit_bias),
        ):
            if ids and not 0 <= min(ids) <= max(ids) < config.vocab_size:
                raise BadRequest(f"{name} has a token outside the vocabulary", param=name)
        if call.min_tokens > call.max_tokens:
            raise BadRequest("min_tokens is above max_tokens", param="min_tokens")

    # Parts of the calls

    def _reserve(self, call: RemoteSend, begin: int, end: int, put: Put) -> Send:
        """A send with its sequence and all the pages it needs, or `NoCapacity` at once."""
        tokens = call.prompt[:end]
        if self.cache.layout.pages_for(end) > self.cache.page_use().total:
            raise BadRequest(f"{end} tokens exceed this engine's KV pool", param="end")
        seq_id = next(self._seq_ids)
        with self.cache.lock:
            # Matched beyond `end` too: a cached page can be sent in part.
            cached = min(self.cache.add_sequence(seq_id, call.prompt), end)
            try:
                self.cache.grow(seq_id, end)
            except NoCapacity:
                self.cache.remove_sequence(seq_id)
                raise
        self.metrics.prefix(end, cached)
        done: Future[RemoteSendReply] = Future()
        done.set_running_or_notify_cancel()  # the loop's to complete, whoever stops waiting
        return Send(
            request_id=call.request_id,
            seq_id=seq_id,
            tokens=tokens,
            begin=begin,
            cached=cached,
            put=put,
            done=done,
            arrived=time.monotonic(),
            started=True,
        )

    async def _start_lease(
        self, generation: Generation, lease_id: LeaseId, begin: int | None
    ) -> None:
        """Wait for `begin` tokens to land, as long as the lease lives, and then for the sender to
        let go; one that does not, because it was stopped, is left behind."""
        landed_at: float | None = None
        while True:
            now = time.monotonic()
            try:
                generation.cached = self.cache.start_lease(
                    lease_id,
                    generation.seq_id,
                    generation.tokens,
                    begin,
                    fence=landed_at is not None and now - landed_at > FENCE_AFTER_S,
                )
            except KVIncomplete:
                if landed_at is None and self.cache.lease(lease_id).landed >= (begin or 0):
                    landed_at = now
                await asyncio.sleep(LANDING_POLL_S)
            else:
                generation.begin = generation.cached
                generation.started = True
                return

    def _abort(self, job: Job) -> None:
        self.loop.abort(job)
        if isinstance(job, Generation):
            stream = self._streams.get(job)
            if stream is not None:
                stream.put(Drawn(job, failure=MicroserveError("the request was released")))


def _resolve(value: int, length: int, name: str) -> int:
    """A begin or end, negative ones from the end. Raises `BadRange` outside [0, length]."""
    position = value + length if value < 0 else value
    if not 0 <= position <= length:
        raise BadRange(f"{name} {value} is outside the prompt of {length} tokens", param=name)
    return position

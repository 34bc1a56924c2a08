"""One generation as its caller sees it: drawn tokens in, events out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable

from tokenizers import Tokenizer

from engine.api.metrics import EngineMetrics
from engine.execution.step_loop import Drawn
from engine.protocol import (
    Event,
    Internal,
    MicroserveError,
    Mirrored,
    TokenLogprob,
    Usage,
    error_body,
)
from engine.scheduling.jobs import Generation, Sampled
from engine.text.detokenizer import Detokenizer, Released, token_bytes

__all__ = ["GenerationStream"]

log = logging.getLogger(__name__)


class GenerationStream:
    """The events of one generation. Iterate to its end, or `close` it, which aborts."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        eos: frozenset[int],
        metrics: EngineMetrics,
        ended: Callable[[Generation], None],
    ) -> None:
        """`ended` is called once or more when nobody listens any longer. `events` or `deliver`."""
        sampling = generation.sampling
        self._generation = generation
        self._tokenizer = tokenizer
        self._eos = eos
        self._metrics = metrics
        self._ended = ended
        self._detokenizer = Detokenizer(
            tokenizer,
            generation.tokens,
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
        )
        self._drawn: asyncio.Queue[Drawn] = asyncio.Queue()
        self._sink: Callable[[Event], None] | None = None
        self._began = time.monotonic()
        self._previous = self._began  # when the call, or its last token, came
        self._first_token = self._first_event = True
        self._leased = generation.started  # its prefix was looked up for the lease, and counted
        self._over = False
        self._told: Mirrored | None = None  # of the mirror
        self._completion = len(generation.output)  # what was delivered; the loop may be ahead

    def put(self, drawn: Drawn) -> None:
        """Take over what a step drew for this generation."""
        if self._sink is None:
            self._drawn.put_nowait(drawn)
        else:
            self._pass_on(drawn, self._sink)

    async def events(self) -> AsyncIterator[Event]:
        """One event for each step that released tokens; the last has a `finish_reason`.

        Raises the failure that ended the generation. Leaving early aborts it.
        """
        try:
            while True:
                event = self._next(await self._drawn.get())
                if event is not None:
                    yield event
                    if event.finish_reason is not None:
                        return
        finally:
            self.close()

    def deliver(self, sink: Callable[[Event], None]) -> None:
        """Give the events to `sink` as they come; a failure is an event too, and the last."""
        self._sink = sink
        while not self._drawn.empty():
            self._pass_on(self._drawn.get_nowait(), sink)

    def close(self) -> None:
        """Abort the generation, if it still runs. Idempotent."""
        self._ended(self._generation)

    def _pass_on(self, drawn: Drawn, sink: Callable[[Event], None]) -> None:
        if self._over:
            return
        try:
            event = self._next(drawn)
        except MicroserveError as error:
            event = Event(error=error_body(error)["error"])
        except Exception as error:  # of this one stream: what else the step drew must go on
            log.exception("the stream of %s failed", self._generation.request_id)
            event = Event(error=error_body(Internal(f"{type(error).__name__}: {error}"))["error"])
        if event is None:
            return
        if event.finish_reason is not None or event.error is not None:
            self._over = True
            self.close()
        sink(event)

    def _next(self, drawn: Drawn) -> Event | None:
        """The event of one step, if it released a token. Raises the generation's failure."""
        if drawn.failure is not None:
            raise drawn.failure
        if drawn.sampled is None:
            raise Internal("a step delivered nothing")
        now = time.monotonic()
        self._metrics.token(now - self._previous, first=self._first_token)
        self._previous, self._first_token = now, False
        self._completion += 1
        released = self._detokenizer.push(drawn.sampled, last=drawn.finish is not None)
        if drawn.finish is None and released.stopped is None and not released.sampled:
            return None
        event = self._event(drawn, released)
        if self._first_event:
            event.begin, self._first_event = self._generation.begin, False
            if not self._leased:
                cached = min(self._generation.cached, self._generation.prompt_len)
                self._metrics.prefix(self._generation.prompt_len, cached)
        return event

    def _event(self, drawn: Drawn, released: Released) -> Event:
        generation = self._generation
        event = Event(token_ids=[sampled.token for sampled in released.sampled], text=released.text)
        if generation.sampling.logprobs is not None:
            event.logprobs = [self._logprob(sampled) for sampled in released.sampled]
        if released.stopped is not None:
            event.finish_reason, event.stop_reason = "stop", released.stopped
        elif drawn.finish is not None and drawn.sampled is not None:
            event.finish_reason = drawn.finish
            if drawn.finish == "stop" and drawn.sampled.token not in self._eos:
                event.stop_reason = drawn.sampled.token
        event.mirror = self._mirrored(last=event.finish_reason is not None)
        if event.finish_reason is not None:
            event.usage = Usage(
                prompt_tokens=generation.prompt_len,
                completion_tokens=self._completion,
                cached_tokens=min(generation.cached, generation.prompt_len),
            )
            seconds = time.monotonic() - self._began
            self._metrics.finished(
                event.finish_reason, generation.prompt_len, self._completion, seconds
            )
        return event

    def _mirrored(self, *, last: bool) -> Mirrored | None:
        """How far the mirror is, if there is one and that is news."""
        mirror = self._generation.mirror
        if mirror is None:
            return None
        now = Mirrored(lease_id=mirror.lease_id, landed=mirror.landed)
        if mirror.stopped is not None:
            now.stopped, now.message = mirror.stopped.type, mirror.stopped.message
        if now == self._told and not last:
            return None
        self._told = now
        return now

    def _logprob(self, sampled: Sampled) -> TokenLogprob:
        """A drawn token's log probability in its wire form."""

        def item(token: int, logprob: float) -> TokenLogprob:
            text, raw = token_bytes(self._tokenizer, token)
            return TokenLogprob(token_id=token, token=text, bytes=raw, logprob=logprob)

        chosen = item(sampled.token, sampled.logprob or 0.0)
        chosen.top = [item(token, logprob) for token, logprob in sampled.top]
        return chosen

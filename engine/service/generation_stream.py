"""The stream of one generation: step outputs in, events out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable

from tokenizers import Tokenizer

from engine.execution.step_output import StepOutput
from engine.protocol import (
    Event,
    Internal,
    MicroserveError,
    Mirrored,
    TokenLogprob,
    Usage,
    error_body,
)
from engine.sampling.sampled import Sampled
from engine.scheduling import Generation
from engine.service.metrics import EngineMetrics
from engine.text import Detokenizer, Released, token_bytes

__all__ = ["GenerationStream"]

log = logging.getLogger(__name__)


class GenerationStream:
    """The events of one generation, through either `events` or `subscribe`.

    Consume them to the end, or `close` the stream, which aborts the generation.
    """

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        eos: frozenset[int],
        metrics: EngineMetrics,
        ended: Callable[[Generation], None],
    ) -> None:
        """`ended` is called, possibly more than once, when the stream has ended or is closed."""
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
        self._outputs: asyncio.Queue[StepOutput] = asyncio.Queue()
        self._on_event: Callable[[Event], None] | None = None
        self._began = time.monotonic()
        self._previous = self._began  # time of the call, then of the latest token
        self._first_token = self._first_event = True
        self._leased = generation.started  # its prefix was counted with the lease
        self._over = False
        self._reported: Mirrored | None = None
        self._completion = len(generation.output)  # delivered tokens; the step loop may be ahead

    def put(self, output: StepOutput) -> None:
        """Add the output of one step."""
        if self._on_event is None:
            self._outputs.put_nowait(output)
        else:
            self._forward(output, self._on_event)

    async def events(self) -> AsyncIterator[Event]:
        """Yield one event for each step that releases tokens; the last has a `finish_reason`.

        Raises the failure that ended the generation. Leaving the iteration early aborts it.
        """
        try:
            while True:
                event = self._next(await self._outputs.get())
                if event is not None:
                    yield event
                    if event.finish_reason is not None:
                        return
        finally:
            self.close()

    def subscribe(self, on_event: Callable[[Event], None]) -> None:
        """Call `on_event` with each event, including earlier ones; a failure is the last event."""
        self._on_event = on_event
        while not self._outputs.empty():
            self._forward(self._outputs.get_nowait(), on_event)

    def close(self) -> None:
        """Abort the generation, if it still runs. Idempotent."""
        self._ended(self._generation)

    def _forward(self, output: StepOutput, on_event: Callable[[Event], None]) -> None:
        if self._over:
            return
        try:
            event = self._next(output)
        except MicroserveError as error:
            event = Event(error=error_body(error)["error"])
        except Exception as error:  # fails this stream only, not the step's other outputs
            log.exception("the stream of %s failed", self._generation.request_id)
            event = Event(error=error_body(Internal(f"{type(error).__name__}: {error}"))["error"])
        if event is None:
            return
        if event.finish_reason is not None or event.error is not None:
            self._over = True
            self.close()
        on_event(event)

    def _next(self, output: StepOutput) -> Event | None:
        """Return the event of one step, or None if the step released no token.

        Raises the generation's failure.
        """
        if output.failure is not None:
            raise output.failure
        if output.sampled is None:
            raise Internal("a step output without a token or a failure")
        now = time.monotonic()
        self._metrics.token(now - self._previous, first=self._first_token)
        self._previous, self._first_token = now, False
        self._completion += 1
        released = self._detokenizer.push(output.sampled, last=output.finish is not None)
        if output.finish is None and released.stopped is None and not released.sampled:
            return None
        event = self._event(output, released)
        if self._first_event:
            event.begin, self._first_event = self._generation.begin, False
            if not self._leased:
                cached = min(self._generation.cached, self._generation.prompt_len)
                self._metrics.prefix(self._generation.prompt_len, cached)
        return event

    def _event(self, output: StepOutput, released: Released) -> Event:
        generation = self._generation
        event = Event(token_ids=[sampled.token for sampled in released.sampled], text=released.text)
        if generation.sampling.logprobs is not None:
            event.logprobs = [self._logprob(sampled) for sampled in released.sampled]
        if released.stopped is not None:
            event.finish_reason, event.stop_reason = "stop", released.stopped
        elif output.finish is not None and output.sampled is not None:
            event.finish_reason = output.finish
            if output.finish == "stop" and output.sampled.token not in self._eos:
                event.stop_reason = output.sampled.token
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
        """Return the mirror's progress, or None if there is none or it was reported before."""
        mirror = self._generation.mirror
        if mirror is None:
            return None
        now = Mirrored(lease_id=mirror.lease_id, landed=mirror.landed)
        if mirror.stopped is not None:
            now.stopped, now.message = mirror.stopped.type, mirror.stopped.message
        if now == self._reported and not last:
            return None
        self._reported = now
        return now

    def _logprob(self, sampled: Sampled) -> TokenLogprob:
        """Return a sampled token's log probability in its wire form."""

        def item(token: int, logprob: float) -> TokenLogprob:
            text, raw = token_bytes(self._tokenizer, token)
            return TokenLogprob(token_id=token, token=text, bytes=raw, logprob=logprob)

        chosen = item(sampled.token, sampled.logprob or 0.0)
        chosen.top = [item(token, logprob) for token, logprob in sampled.top]
        return chosen

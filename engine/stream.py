"""One generation as its caller sees it: drawn tokens in, events out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from tokenizers import Tokenizer

from engine.detokenizer import Detokenizer, Released, token_bytes
from engine.job import Generation, Sampled
from engine.loop import Drawn
from engine.metrics import EngineMetrics
from engine.protocol import Event, Internal, TokenLogprob, Usage

__all__ = ["GenerationStream"]


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
        """`ended` is called once or more when nobody listens any longer."""
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
                self._metrics.token(now - previous, first=first_token)
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
        self._ended(self._generation)

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
        if event.finish_reason is not None:
            event.usage = Usage(
                prompt_tokens=generation.prompt_len,
                completion_tokens=self._completion,
                cached_tokens=min(generation.cached, generation.prompt_len),
            )
        return event

    def _logprob(self, sampled: Sampled) -> TokenLogprob:
        """A drawn token's log probability in its wire form."""

        def item(token: int, logprob: float) -> TokenLogprob:
            text, raw = token_bytes(self._tokenizer, token)
            return TokenLogprob(token_id=token, token=text, bytes=raw, logprob=logprob)

        chosen = item(sampled.token, sampled.logprob or 0.0)
        chosen.top = [item(token, logprob) for token, logprob in sampled.top]
        return chosen

"""The stream of one virtual generation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from engine.execution.step_output import StepOutput
from engine.protocol import Internal, MicroserveError, Mirrored, Usage
from engine.scheduling import Generation, KVMirror
from engine.virtual.tokens import VOCAB

__all__ = ["VirtualEvent", "VirtualStream"]

WORDS = [f"w{token} " for token in range(VOCAB)]


@dataclass(slots=True)
class VirtualEvent:
    """The fields of `engine.protocol.Event` that virtual engines fill."""

    token_ids: list[int]
    begin: int | None = None
    finish_reason: Literal["stop", "length"] | None = None
    usage: Usage | None = None
    mirror: Mirrored | None = None

    @property
    def text(self) -> str:
        """The text of token 7 is `w7 `."""
        return "".join([WORDS[token] for token in self.token_ids])


class VirtualStream:
    """The events of one generation, each but the first and the last with `stream_tokens` tokens.

    Consume them to the end, or `close` the stream, which aborts the generation.
    """

    def __init__(
        self, generation: Generation, stream_tokens: int, ended: Callable[[Generation], None]
    ) -> None:
        """`ended` is called, possibly more than once, when the stream has ended or is closed."""
        self.generation = generation
        self.events = 0  # so far
        self._stream_tokens = stream_tokens
        self._ended = ended
        self._completion = generation.target - generation.prompt_len
        self._held: list[int] = []
        self._first = True
        self._reported: Mirrored | None = None
        self._event: VirtualEvent | None = None
        self._error: MicroserveError | None = None
        self._over = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: StepOutput) -> None:
        """Add the output of one step, or of equal steps in a row."""
        if self._over:
            return
        if output.failure is not None or output.sampled is None:
            self.fail(output.failure or Internal("a step output without a token or a failure"))
            return
        held = self._held
        held += output.sampled.earlier
        held.append(output.sampled.token)
        mirror = self.generation.mirror
        last = output.finish is not None
        mirrored = None if mirror is None else self._mirrored(mirror, last=last)
        if not (self._first or output.finish or mirrored or len(held) >= self._stream_tokens):
            return
        self._held = []
        self._completion += len(held)
        event = VirtualEvent(held, finish_reason=output.finish, mirror=mirrored)
        if self._first:
            self._first = False
            event.begin = self.generation.begin
        if output.finish is not None:
            self._over = True
            event.usage = Usage.model_construct(
                prompt_tokens=self.generation.prompt_len,
                completion_tokens=self._completion,
                cached_tokens=min(self.generation.cached, self.generation.prompt_len),
            )
            self._ended(self.generation)
        self._push(event)

    async def next(self) -> VirtualEvent:
        """Return the next event. Raises the failure, after the events before it."""
        while self._event is None:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        event, self._event = self._event, None
        return event

    def fail(self, error: MicroserveError) -> None:
        """Raise `error` from `next`, after the tokens so far; the generation is given up."""
        if self._over:
            return
        self._over = True
        if self._held:
            self._push(VirtualEvent(self._held))
            self._held = []
        self._error = error
        self._ended(self.generation)
        self._wake()

    def close(self) -> None:
        """Abort the generation, if it still runs. Idempotent."""
        self._over = True
        self._ended(self.generation)

    def _push(self, event: VirtualEvent) -> None:
        self.events += 1
        if self._event is not None:  # not read yet: one event for both
            event.token_ids = self._event.token_ids + event.token_ids
            event.begin = self._event.begin
            event.mirror = event.mirror or self._event.mirror
        self._event = event
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _mirrored(self, mirror: KVMirror, *, last: bool) -> Mirrored | None:
        """Return the mirror's progress, or None if it was reported before."""
        stopped = mirror.stopped
        now = Mirrored.model_construct(
            lease_id=mirror.lease_id,
            landed=mirror.landed,
            stopped=None if stopped is None else stopped.type,
            message=None if stopped is None else stopped.message,
        )
        if now == self._reported and not last:
            return None
        self._reported = now
        return now

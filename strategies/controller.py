"""How much of a prompt each of two engines should prefill: a feedback controller.

What one engine computes of a request, the other one need not; within the request they work one
after the other, so where it is computed changes nothing for the request itself. It changes how long
others wait: on a prefill engine those that come behind, on a decode engine the streams that run
there (a step with a chunk of prefill takes longer for all of them) and the chunks behind it. So the
last token that is moved should delay as many on one side as on the other.

Requests come at a rate λ. A prefill engine that has B ms to do and is given x more has λ·(B + x)
requests behind its last token, and while they wait others come: of a share ρ of its time in use,
λ·(B + x) / (1 - ρ) in all. A decode engine where each request decodes for T ms has λ·T streams
(Little's law), and with G ms of prefill promised to it λ·G / (1 - ρ) requests behind these. λ
cancels out: with two engines alike, of a prompt that takes S ms the prefill engine gets x, so that

    B + x = (1 - ρ)·T + G + 0.6·S - x.

(The S - x that the decode engine then has of the prompt would be there in place of 0.6·S - x if
requests came to it at random; they come one by one from the prefill engine, and wait less. For ρ,
what all engines together have to prefill is shared out evenly, and no more than 0.4 believed: what
is measured over a few requests is often too much. In a model of the engines, `tests/strategies`,
the rule is about as good as the best fixed ratio at any load, with any number of engines of either
role.)

B and G follow every request at once. T, ρ and the engines' speeds are measured, and forget slowly.
The speeds say when an engine is another kind of machine. Whether it had to end a step first, or
took two prompts in one, moves them by a half: engines that seem to differ by less are alike. No
error is summed up, so there is nothing to wind up or to swing: after a change of the workload the
backlogs are right with the next request, the rest after some ten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from types import TracebackType

from router import Chunk

__all__ = ["Controller", "Division"]

FIRST_SHARE = 0.1  # the decode engine's, as long as nothing has been measured
FIRST_TOKENS = 16  # but none where that is less: it would be a chunk of its own for nothing
KEEP = 0.9  # of what was measured before, with each new measurement
ALIKE = 1.6  # by what factor the measured speeds of two engines may differ that are alike
BUSIEST = 0.4  # the most that is believed of how busy the engines are
OWN = 0.6  # of a prompt, for how it waits for itself
CHUNK_TOKENS = 64  # a chunk of a decode step must be that large to tell the engine's speed


class Controller:
    """What is known of the engines, for all requests of a generation: `cluster.state(Controller)`.

    It knows of no work but that which it has divided: to it, an engine that is also used by others
    is slower.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock` tells seconds; by default it is the event loop's."""
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._sides: dict[str, _Side] = {}
        self._speed = _Mean()  # of all engines, for those that have not been measured
        self._decoding = _Mean()  # ms a request decodes for, without its first token
        self._offered = _Mean()  # tokens to be prefilled, a ms
        self._asked: float | None = None  # when the last request came (s)

    def divide(
        self,
        tokens: int,
        *,
        prefill: str,
        decode: str,
        prefills: Collection[str],
        decodes: Collection[str],
    ) -> Division:
        """Divide the `tokens` that neither engine has cached. Engines are named by id;
        `prefills` and `decodes` are all that could have been chosen, so that it is known how much
        of what comes will come to these two. To be entered, as soon as it is made."""
        self._meet({prefill, decode, *prefills, *decodes})
        sender, receiver = self._sides[prefill], self._sides[decode]
        free = 1.0 - self._busy(tokens, len({*prefills, *decodes}))
        first = round(tokens * FIRST_SHARE)
        share = tokens - (first if first >= FIRST_TOKENS else 0)
        if sender is receiver:
            share = 0
        elif self._speed.known and self._decoding.known:
            share = self._share(
                tokens,
                self._marginal(sender, free, prefills, decodes),
                self._marginal(receiver, free, prefills, decodes),
            )
        share = min(max(share, 0), tokens - 1)  # the last token is the decode engine's: it samples
        return Division(self, sender, receiver, share, tokens - share)

    def _busy(self, tokens: int, engines: int) -> float:
        """The share of their time that all engines prefill for; another request has come."""
        now = self._clock()
        if self._asked is not None:
            self._offered.add(tokens, (now - self._asked) * 1e3)
        self._asked = now
        if not (self._offered.known and self._speed.known):
            return 0.0
        return min(self._offered.value * self._speed.value / engines, BUSIEST)

    def _marginal(
        self, side: _Side, free: float, prefills: Collection[str], decodes: Collection[str]
    ) -> tuple[float, float, float]:
        """Of an engine: ms per token; how many wait behind it, as ms of arrivals; and the share of
        arrivals that will."""
        decoding = (side.id in decodes) / max(len(decodes), 1)
        joining = decoding + (side.id in prefills) / max(len(prefills), 1)
        speed = side.speed.value if side.speed.known else self._speed.value
        backlog = side.backlog_ms(speed, self._clock())
        return speed, free * decoding * self._decoding.value + joining * backlog, joining

    @staticmethod
    def _share(
        tokens: int, sender: tuple[float, float, float], receiver: tuple[float, float, float]
    ) -> int:
        """Where the last token of the sender's delays as many as the last of the receiver's."""
        speed, behind, joining = sender
        slow, there, arriving = receiver
        if max(slow, speed) < ALIKE * min(slow, speed):
            slow = speed = (slow + speed) / 2
        own = arriving * slow * tokens * OWN
        weight = joining * speed**2 + arriving * slow**2
        return round((slow * (there + own) - speed * behind) / weight) if weight else tokens

    def _meet(self, ids: set[str]) -> None:
        """Have a side for each of these engines; forget those that are gone, if there are new."""
        if new := ids - self._sides.keys():
            kept = {id: side for id, side in self._sides.items() if id in ids or side.tokens}
            self._sides = kept | {id: _Side(id) for id in new}


class Division:
    """One request's: `prefill_tokens` to be computed by the prefill engine, the rest by the decode
    engine. Entered around all that is done; what was not done when it is left is not waited for."""

    def __init__(
        self,
        controller: Controller,
        sender: _Side,
        receiver: _Side,
        prefill_tokens: int,
        decode_tokens: int,
    ) -> None:
        self.prefill_tokens = prefill_tokens
        self._controller = controller
        self._sender = sender
        self._receiver = receiver
        self._rest = decode_tokens
        self._sending: _Work | None = None
        self._chunk: _Work | None = None
        self._first: float | None = None  # when the first token came

    def __enter__(self) -> Division:
        now = self._controller._clock()
        if self.prefill_tokens:
            self._receiver.promised += self._rest
            self._sending = self._sender.begin(self.prefill_tokens, now)
        else:
            self._chunk = self._receiver.begin(self._rest, now)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        now = self._controller._clock()
        if self._sending is not None:
            self._sender.end(self._sending, now)
            self._receiver.promised -= self._rest
        if self._chunk is not None:
            self._receiver.end(self._chunk, now)

    def sent(self, computed: int) -> None:
        """The prefill engine has done its part, and has computed so many tokens for it."""
        if self._sending is None:
            return
        now = self._controller._clock()
        took = self._sender.end(self._sending, now)
        self._sending = None
        self._receiver.promised -= self._rest
        self._chunk = self._receiver.begin(self._rest, now)
        self._measured(self._sender, took, computed)

    def drew(self, chunk: Chunk) -> None:
        """The decode engine has emitted `chunk`."""
        controller = self._controller
        if self._chunk is not None and chunk.token_ids:
            self._first = controller._clock()
            took = self._receiver.end(self._chunk, self._first)
            self._chunk = None
            if self._rest >= CHUNK_TOKENS:
                self._measured(self._receiver, took, self._rest)
        if chunk.finish_reason is not None and self._first is not None:
            controller._decoding.add((controller._clock() - self._first) * 1e3)

    def _measured(self, side: _Side, took_ms: float, tokens: int) -> None:
        """So many tokens of prefill took so long there."""
        if tokens:
            side.speed.add(took_ms, tokens)
            self._controller._speed.add(took_ms, tokens)


class _Mean:
    """A mean that forgets: of each 10 measurements, what was before counts a third as much."""

    __slots__ = ("_of", "_sum")

    def __init__(self) -> None:
        self._sum = self._of = 0.0

    def add(self, amount: float, of: float = 1) -> None:
        self._sum = KEEP * self._sum + amount
        self._of = KEEP * self._of + of

    @property
    def known(self) -> bool:
        return self._of > 0

    @property
    def value(self) -> float:
        return self._sum / self._of


class _Work:
    """Some tokens to be prefilled, there since `began` (s)."""

    __slots__ = ("began", "tokens")

    def __init__(self, tokens: int, began: float) -> None:
        self.tokens = tokens
        self.began = began


class _Side:
    """One engine's prefills: a queue that is worked off in turn, whoever asked for them."""

    __slots__ = ("_ended", "_there", "id", "promised", "speed")

    def __init__(self, id: str) -> None:
        self.id = id
        self.speed = _Mean()  # ms a token
        self.promised = 0  # tokens that will come, when another engine has done its part
        self._there: list[_Work] = []
        self._ended = 0.0  # when the last one ended (s)

    @property
    def tokens(self) -> int:
        """What is left to do, here or promised."""
        return self.promised + sum(work.tokens for work in self._there)

    def begin(self, tokens: int, now: float) -> _Work:
        work = _Work(tokens, now)
        self._there.append(work)
        return work

    def end(self, work: _Work, now: float) -> float:
        """It is done, or will not be. Returns how long it was worked on: since the one before it
        was done, if it came before that (ms)."""
        self._there.remove(work)
        took = now - max(work.began, self._ended)
        self._ended = now
        return took * 1e3

    def backlog_ms(self, speed: float, now: float) -> float:
        """How long all of it takes at `speed`, less what must have been done of the first one."""
        left = self.tokens * speed
        if self._there:
            first = self._there[0]
            done = (now - max(first.began, self._ended)) * 1e3
            left -= min(done, first.tokens * speed)
        return left

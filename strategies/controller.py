"""How much of a prompt each of two engines should prefill: a feedback controller.

A token of the prompt that one engine computes, the other need not. Within one request the engines
work one after the other, so the division does not change the request's own latency. It changes how
long others wait: on a prefill engine the requests queued behind it; on a decode engine the streams
that run there (a step with a chunk of prefill takes longer for all of them) and the chunks behind
it. So the last token moved should delay as many requests on one engine as on the other.

Let requests arrive at a rate λ. A prefill engine with B ms of work that is given x ms more has
λ·(B + x) requests behind its last token, and others arrive while they wait: λ·(B + x) / (1 - ρ) in
all if a share ρ of its time is in use. A decode engine where each request decodes for T ms has λ·T
streams (Little's law), and with G ms of prefill promised to it λ·G / (1 - ρ) requests behind these.
λ cancels out: with two equal engines and a prompt that takes S ms, the prefill engine gets x where

    0.5·B + x = (1 - ρ)·T + G + 0.7·S - x.

(B counts half: requests that come while it is large leave more to the decode engines, so that fewer
wait behind x. If requests came to the decode engine at random, S - x, its own part of the prompt,
would stand in place of 0.7·S - x. They come one by one from the prefill engine, and wait less. For
ρ, the prefill work of all engines is spread evenly, and at most 0.4 is assumed: a measurement over
few requests is often too high. On virtual engines, the rule is about as good as the best fixed
ratio at any load, with any number of engines of either role: `tests/strategies/test_balanced.py`.)

B and G follow every request at once. T, ρ and the engines' speeds are measured and forget slowly.
The speeds tell whether an engine is a different machine. Whether an engine first had to finish a
step, or computed two prompts in one, changes a measurement by half, so engines whose speeds differ
by less are treated as equal. No error is integrated, so nothing can wind up or oscillate: after a
change of the workload the backlogs are right with the next request, the rest after some ten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from types import TracebackType

from router import Chunk

__all__ = ["Controller", "Division"]

FIRST_SHARE = 0.1  # the decode engine's share until something has been measured
FIRST_TOKENS = 16  # a smaller first share is not worth a chunk of its own
KEEP = 0.9  # weight of the earlier measurements at each new one
ALIKE = 1.6  # factor up to which measured speeds count as equal
BUSIEST = 0.4  # upper bound of the assumed ρ
QUEUED = 0.5  # factor of B in the rule
OWN = 0.7  # factor of S in the rule
CHUNK_TOKENS = 64  # smaller chunks of a decode step say little about the engine's speed


class Controller:
    """What is known of the engines, shared by all requests: `cluster.state(Controller)`.

    It knows only the work that it has divided; an engine with other work looks slower to it.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock` returns seconds; defaults to the event loop's."""
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._engines: dict[str, _EngineQueue] = {}
        self._speed = _Mean()  # of all engines, for those not measured yet
        self._decoding = _Mean()  # ms that a request decodes, without its first token
        self._offered = _Mean()  # tokens to prefill per ms
        self._arrived: float | None = None  # when the last request came (s)

    def divide(
        self,
        tokens: int,
        *,
        prefill: str,
        decode: str,
        prefills: Collection[str],
        decodes: Collection[str],
    ) -> Division:
        """Divide the `tokens` that neither engine has cached. Enter the result at once.

        Engines are named by id. `prefills` and `decodes` are all engines that could have been
        chosen; they tell how many of the coming requests will go to these two.
        """
        self._meet({prefill, decode, *prefills, *decodes})
        sender, receiver = self._engines[prefill], self._engines[decode]
        free = 1.0 - self._busy(tokens, len({*prefills, *decodes}))
        first = round(tokens * FIRST_SHARE)
        share = tokens - (first if first >= FIRST_TOKENS else 0)
        if sender is receiver:
            share = 0
        elif self._speed.known and self._decoding.known:
            share = self._share(
                tokens,
                self._marginal(sender, free, prefills, decodes, queued=QUEUED),
                self._marginal(receiver, free, prefills, decodes, queued=1.0),
            )
        # The decode engine always computes the last token: it samples.
        share = min(max(share, 0), tokens - 1)
        return Division(self, sender, receiver, share, tokens - share)

    def _busy(self, tokens: int, engines: int) -> float:
        """Note a request; return the share of time that all engines spend on prefill (ρ)."""
        now = self._clock()
        if self._arrived is not None:
            self._offered.add(tokens, (now - self._arrived) * 1e3)
        self._arrived = now
        if not (self._offered.known and self._speed.known):
            return 0.0
        return min(self._offered.value * self._speed.value / engines, BUSIEST)

    def _marginal(
        self,
        engine: _EngineQueue,
        free: float,
        prefills: Collection[str],
        decodes: Collection[str],
        *,
        queued: float,
    ) -> tuple[float, float, float]:
        """Return an engine's ms per token, its waiters, and its share of the arrivals.

        Waiters are counted in ms of arrivals. `queued` is the factor of the engine's own backlog.
        """
        decoding = (engine.id in decodes) / max(len(decodes), 1)
        joining = decoding + (engine.id in prefills) / max(len(prefills), 1)
        speed = engine.speed.value if engine.speed.known else self._speed.value
        backlog = queued * engine.backlog_ms(speed, self._clock())
        return speed, free * decoding * self._decoding.value + joining * backlog, joining

    @staticmethod
    def _share(
        tokens: int, sender: tuple[float, float, float], receiver: tuple[float, float, float]
    ) -> int:
        """Return the division where one token delays as many requests on either engine."""
        speed, behind, joining = sender
        slow, there, arriving = receiver
        if max(slow, speed) < ALIKE * min(slow, speed):
            slow = speed = (slow + speed) / 2
        own = arriving * slow * tokens * OWN
        weight = joining * speed**2 + arriving * slow**2
        return round((slow * (there + own) - speed * behind) / weight) if weight else tokens

    def _meet(self, ids: set[str]) -> None:
        """Add new engines; if there are any, forget those that are gone."""
        if new := ids - self._engines.keys():
            kept = {
                id: engine for id, engine in self._engines.items() if id in ids or engine.tokens
            }
            self._engines = kept | {id: _EngineQueue(id) for id in sorted(new)}


class Division:
    """One request's division: the decode engine computes all but `prefill_tokens`.

    Entered around the request's calls. Work that is not done on exit no longer counts.
    """

    def __init__(
        self,
        controller: Controller,
        sender: _EngineQueue,
        receiver: _EngineQueue,
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
        """Note that the prefill engine has done its part, computing this many tokens."""
        if self._sending is None:
            return
        now = self._controller._clock()
        took = self._sender.end(self._sending, now)
        self._sending = None
        self._receiver.promised -= self._rest
        self._chunk = self._receiver.begin(self._rest, now)
        self._note_speed(self._sender, took, computed)

    def received(self, chunk: Chunk) -> None:
        """Note a chunk of the decode engine."""
        controller = self._controller
        if self._chunk is not None and chunk.token_ids:
            self._first = controller._clock()
            took = self._receiver.end(self._chunk, self._first)
            self._chunk = None
            if self._rest >= CHUNK_TOKENS:
                self._note_speed(self._receiver, took, self._rest)
        if chunk.finish_reason is not None and self._first is not None:
            controller._decoding.add((controller._clock() - self._first) * 1e3)

    def _note_speed(self, engine: _EngineQueue, took_ms: float, tokens: int) -> None:
        """Note how long a prefill took there."""
        if tokens:
            engine.speed.add(took_ms, tokens)
            self._controller._speed.add(took_ms, tokens)


class _Mean:
    """An exponentially weighted mean: after 10 measurements, earlier ones count a third."""

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
    """Tokens to prefill, queued since `began` (s)."""

    __slots__ = ("began", "tokens")

    def __init__(self, tokens: int, began: float) -> None:
        self.tokens = tokens
        self.began = began


class _EngineQueue:
    """One engine's prefills, computed in order of arrival."""

    __slots__ = ("_ended", "_queue", "id", "promised", "speed")

    def __init__(self, id: str) -> None:
        self.id = id
        self.speed = _Mean()  # ms a token
        self.promised = 0  # tokens that follow once another engine has done its part
        self._queue: list[_Work] = []
        self._ended = 0.0  # when the last one ended (s)

    @property
    def tokens(self) -> int:
        """Tokens left to compute, queued or promised."""
        return self.promised + sum(work.tokens for work in self._queue)

    def begin(self, tokens: int, now: float) -> _Work:
        work = _Work(tokens, now)
        self._queue.append(work)
        return work

    def end(self, work: _Work, now: float) -> float:
        """Remove work that is done or given up; return how long it was computed (ms).

        That is the time since its arrival, or since the end of the work before it.
        """
        self._queue.remove(work)
        took = now - max(work.began, self._ended)
        self._ended = now
        return took * 1e3

    def backlog_ms(self, speed: float, now: float) -> float:
        """Return the time (ms) for all of it at `speed`, less what is done of the first."""
        left = self.tokens * speed
        if self._queue:
            first = self._queue[0]
            done = (now - max(first.began, self._ended)) * 1e3
            left -= min(done, first.tokens * speed)
        return left

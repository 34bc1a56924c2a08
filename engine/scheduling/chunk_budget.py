"""The number of prompt tokens that a step may add to its decodes.

    decode_s(decodes) + chunk_s + token_s * tokens  <=  slowdown * decode_s(decodes)

If more prompts wait than sequences decode, the prompts get `waiting / decodes` times the decodes'
time instead: one stream does not keep thirty requests from starting. Where a single further decode
is known to take more than the slowdown, as on processors that multiply one row in another way than
several, the step may take `slowdown` times as long as with that decode: a few tokens would cost as
much, and a prompt would wait for the stream's end.

All terms are estimated from past steps:

- `decode_s`, the time of the decodes alone, is the lower quartile over the latest steps with about
  as many decodes and no prompt tokens. The quartile ignores momentary disturbances of the machine.
- `chunk_s`, what any prompt tokens cost beside their number. On a processor that multiplies four
  rows in another way than more, that may be longer than the decodes. The slope of a step's time
  over its tokens comes from the differences between steps that follow each other, which have about
  the same context; `chunk_s` is what the slope leaves of their time. While steps take few tokens,
  one in `TRIAL_EVERY` takes more, so that there are differences. Steps of few tokens say little, so
  `chunk_s` gives a step at most twice the tokens of those before it.
- `token_s`, the cost of one further token, grows with the context before it; old measurements
  therefore decay within a few steps. The time of a few tokens, fewer than were allowed, is mostly
  that of the step: they change the estimate little.

Where `chunk_s` leaves less than half of the prompts' time, tokens get as much time as `chunk_s`
takes, but at most all of the prompts' time. Such a step exceeds the slowdown. With the few tokens
that fit, it would hardly be shorter, and a prompt would need many times the steps.

The time of a batch that was not measured lately is read off a line through the earlier steps
without prompt tokens. If these all had as many decodes, there is no line, and estimates that are
too small take its place, at the expense of prompts: fewer decodes than measured take their share of
the measured time, more decodes take no longer; the largest of these estimates counts, if two steps
of a batch agree. If fewer than two steps are known, or none of them is recent, the next step is a
probe without prompt tokens. At most one step in `PROBE_EVERY` is a probe, and at most `PROBES` in a
row when the batch changes quickly.

Chunked prefill beside decodes, bounded by the time between two tokens, is due to Sarathi-Serve,
which profiles the budget beforehand; here it is measured while serving.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["MIN_TOKENS", "PROBES", "PROBE_EVERY", "ChunkBudget"]

# Prompt tokens that a step always takes, however long it lasts: one for each half of prefills and
# of sends. So no job starves, and a lone prompt of N tokens takes at most N / 4 steps.
MIN_TOKENS = 4
PROBE_EVERY = 64  # steps
PROBES = 4
MAX_AGE = 160  # steps after which a measurement is dropped; spans at least two probes
MAX_MEASUREMENTS = 32  # steps without prompt tokens
SIMILAR = 1.25  # batches within this ratio take about the same time
DECAY = 0.5  # per step, of the measured token cost
TRIAL_EVERY = 16  # steps with prompt tokens and decodes
TRIAL = 4 * MIN_TOKENS  # the tokens of a trial
CHUNK_DECAY = 0.9  # per step, of the time and tokens that `chunk_s` is taken from
SLOPE_DECAY = 0.98  # per difference between two steps
LONG = 4  # times the decodes' time: chunks of `MIN_TOKENS` that take longer are not tried longer
MEMORY = 0.998  # what a step keeps of its weight in the line, per step without prompt tokens
SPREAD = 0.1  # of the decodes of these steps, relative to their mean: with less there is no line
LEAST_STEPS = 8  # likewise; a step that was held up counts less among more
SLOW = 1.25  # a step counts in the line as this times what the line says, at most


class _DecodeStep(NamedTuple):
    """A measured step without prompt tokens."""

    step: int
    decodes: int
    seconds: float


class _Line:
    """The time of steps without prompt tokens over their decodes: weighted least squares."""

    __slots__ = ("_products", "_squares", "_steps", "_sum", "_times", "_weight")

    def __init__(self) -> None:
        self._weight = self._sum = self._squares = 0.0  # of 1, decodes, and their squares
        self._times = self._products = 0.0  # of the times, and of these times the decodes
        self._steps = 0

    def add(self, decodes: int, seconds: float) -> None:
        expected = self.at(decodes)
        if expected:
            seconds = min(seconds, SLOW * expected)
        self._steps += 1
        self._weight = self._weight * MEMORY + 1
        self._sum = self._sum * MEMORY + decodes
        self._squares = self._squares * MEMORY + decodes * decodes
        self._times = self._times * MEMORY + seconds
        self._products = self._products * MEMORY + decodes * seconds

    def at(self, decodes: int) -> float:
        """Return the time of so many decodes; 0 if the steps do not say how it depends on them."""
        weight, total = self._weight, self._sum
        spread = weight * self._squares - total * total
        if self._steps < LEAST_STEPS or spread <= (SPREAD * total) ** 2:
            return 0.0
        slope = max(weight * self._products - total * self._times, 0.0) / spread
        return max(self._times + slope * (weight * decodes - total), 0.0) / weight


class _TokenCost:
    """The time of prompt tokens, in proportion to their number. Old steps decay quickly."""

    __slots__ = ("_seconds", "_tokens")

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0

    def add(self, tokens: int, seconds: float, share: float) -> None:
        """Learn the time of `tokens`, which were this share of the tokens that were allowed."""
        decay, weight = DECAY**share, share**2
        self._seconds = self._seconds * decay + seconds * weight
        self._tokens = self._tokens * decay + tokens * weight

    def of(self, tokens: int) -> float:
        """Return the time of so many tokens; 0 if nothing is known."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0

    def tokens_in(self, seconds: float) -> float:
        """Return how many tokens take so long; 0 if nothing is known."""
        if not self._tokens:
            return 0.0
        return seconds * self._tokens / self._seconds if self._seconds else math.inf


class _ChunkCost:
    """`chunk_s`, of steps with decodes and prompt tokens: seconds beyond those of the decodes."""

    __slots__ = ("_latest", "_products", "_squares", "_times", "_tokens", "_weight")

    def __init__(self) -> None:
        self._weight = self._tokens = self._times = 0.0  # of the latest steps
        self._squares = self._products = 0.0  # of differences in tokens, and with those in time
        self._latest: tuple[int, int, float] | None = None  # decodes, tokens, seconds

    def add(self, decodes: int, tokens: int, seconds: float) -> None:
        self._weight = self._weight * CHUNK_DECAY + 1
        self._tokens = self._tokens * CHUNK_DECAY + tokens
        self._times = self._times * CHUNK_DECAY + seconds
        if self._latest is not None and self._latest[0] == decodes:
            more, longer = tokens - self._latest[1], seconds - self._latest[2]
            self._squares = self._squares * SLOPE_DECAY + more * more
            self._products = self._products * SLOPE_DECAY + more * longer
        self._latest = decodes, tokens, seconds

    def seconds(self) -> float:
        """Return `chunk_s`; 0 if the steps differ too little to tell."""
        if not self._squares or self._squares * self._weight**2 < self._tokens**2:
            return 0.0
        slope = max(self._products / self._squares, 0.0)
        return max(self._times - slope * self._tokens, 0.0) / self._weight


class ChunkBudget:
    """Arithmetic without a clock: `tokens_allowed` before each step, `record` after it."""

    def __init__(self, slowdown: float = 0.0) -> None:
        """`slowdown` is at least 1; 0 sets no limit."""
        self._slowdown = slowdown
        self._decode_steps: deque[_DecodeStep] = deque(maxlen=MAX_MEASUREMENTS)
        self._line = _Line()
        self._chunk = _ChunkCost()
        self._cost = _TokenCost()  # as if `chunk_s` were 0
        self._cost_beside_chunk = _TokenCost()
        self._most_tokens = 0.0  # of the steps before, halved by each step
        self._steps_to_trial = TRIAL_EVERY
        self._step = 0
        self._estimate: tuple[int, float] | None = None  # decodes, and `_decode_seconds` of these
        self._probes_left = float(PROBES)
        self._allowed = 0  # prompt tokens that the step under way was allowed; 0: unknown

    def tokens_allowed(self, decodes: int, waiting: int, most: int) -> int:
        """Return the prompt tokens for the next step, at most `most`.

        The step has `decodes` decodes, and `waiting` prompts and sends have tokens left. 0 asks for
        a probe.
        """
        self._allowed = most
        if not self._slowdown or not decodes:
            return most
        similar = self._similar(decodes)
        if self._probes_left >= 1 and not self._has_measured(similar):
            self._probes_left -= 1
            return 0
        ratio = max(self._slowdown - 1, waiting / decodes if waiting > decodes else 0.0)
        decode_s = self._decode_seconds(decodes, similar)
        self._estimate = decodes, decode_s
        prompts_s = max(ratio * decode_s, self._of_one_more(decodes, decode_s))
        tokens = self._cost.tokens_in(prompts_s)
        chunk_s = self._chunk.seconds()
        if chunk_s:
            tokens_s = max(prompts_s - chunk_s, min(prompts_s, chunk_s))
            beside = self._cost_beside_chunk.tokens_in(tokens_s)
            tokens = max(tokens, min(beside, 2 * self._most_tokens))
        if tokens < TRIAL and self._steps_to_trial <= 0:
            self._steps_to_trial = TRIAL_EVERY
            if self._cost.of(MIN_TOKENS) < LONG * decode_s:
                tokens = TRIAL
        self._allowed = int(min(most, max(MIN_TOKENS, tokens)))
        return self._allowed

    def record(self, decodes: int, tokens: int, seconds: float) -> None:
        """Learn that a step of `decodes` decodes and `tokens` prompt tokens took `seconds`."""
        if not self._slowdown:
            return
        if not tokens:
            self.record_decodes(decodes, (seconds,))
            return
        self._step += 1
        estimate, self._estimate = self._estimate, None
        allowed, self._allowed = self._allowed, 0
        self._probes_left = min(self._probes_left + 1 / PROBE_EVERY, PROBES)
        if estimate is not None and estimate[0] == decodes:
            decode_s = estimate[1]
        else:
            decode_s = self._decode_seconds(decodes, self._similar(decodes)) if decodes else 0.0
        prompt_s = max(seconds - decode_s, 0.0)
        share = min(tokens / allowed, 1.0) if allowed else 1.0
        chunk_s = 0.0
        if decodes:
            if expected := self._cost.of(tokens):  # caps the weight of a single slow step
                expected = max(expected, self._chunk.seconds() + self._cost_beside_chunk.of(tokens))
                prompt_s = min(prompt_s, max(decode_s, 2 * expected))
            self._chunk.add(decodes, tokens, prompt_s)
            chunk_s = self._chunk.seconds()
            self._steps_to_trial -= 1
        self._cost.add(tokens, prompt_s, share)
        self._cost_beside_chunk.add(tokens, max(prompt_s - chunk_s, 0.0), share)
        self._most_tokens = max(tokens, self._most_tokens / 2**share)

    def record_decodes(self, decodes: int, durations: Sequence[float]) -> None:
        """Learn how long, in seconds, steps of `decodes` decodes and no prompt tokens took."""
        if not self._slowdown:
            return
        self._estimate, self._allowed = None, 0
        steps = enumerate(durations, self._step + 1)
        self._decode_steps += [_DecodeStep(step, decodes, seconds) for step, seconds in steps]
        self._step += len(durations)
        for seconds in durations:
            self._line.add(decodes, seconds)

    def _of_one_more(self, decodes: int, decode_s: float) -> float:
        """Return what prompts may add where one more decode alone would exceed the slowdown; or 0.

        Decodes join without being asked, so a prompt may take that time too, and its share of it.
        """
        joined_s = self._decode_seconds(decodes + 1, self._similar(decodes + 1))
        longest_s = self._slowdown * joined_s
        return longest_s - decode_s if joined_s > self._slowdown * decode_s else 0.0

    def _similar(self, decodes: int) -> list[_DecodeStep]:
        """Return the recent steps with about as many decodes and no prompt tokens."""
        after, least, most = self._step - MAX_AGE, decodes / SIMILAR, decodes * SIMILAR
        return [one for one in self._decode_steps if least <= one[1] <= most and one[0] > after]

    def _has_measured(self, similar: Sequence[_DecodeStep]) -> bool:
        return len(similar) > 1 and self._step - similar[-1].step < PROBE_EVERY

    def _decode_seconds(self, decodes: int, similar: Sequence[_DecodeStep]) -> float:
        """Estimate the time of the decodes alone. 0 if nothing is known."""
        if similar:
            return _lower_quartile([_least(decodes, step) for step in similar])
        batches: dict[int, list[float]] = {}
        for step in self._decode_steps:
            batches.setdefault(step.decodes, []).append(_least(decodes, step))
        known = [_lower_quartile(times) for times in batches.values() if len(times) > 1]
        least = max(known, default=min(itertools.chain(*batches.values()), default=0.0))
        return max(least, self._line.at(decodes))


def _least(decodes: int, step: _DecodeStep) -> float:
    """Return the least time of `decodes` decodes to expect after a measured step."""
    share = decodes / step.decodes if decodes < step.decodes else 1.0
    return step.seconds * share


def _lower_quartile(times: list[float]) -> float:
    return sorted(times)[(len(times) - 1) // 4]

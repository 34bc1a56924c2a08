"""The number of prompt tokens that a step may add to its decodes.

    decode_s(decodes) + token_s * tokens  <=  slowdown * decode_s(decodes)

If more prompts wait than sequences decode, the prompts get `waiting / decodes` times the decodes'
time instead: one stream does not keep thirty requests from starting. Where a single further decode
is known to take more than the slowdown, as on processors that multiply one row in another way than
several, the step may take `slowdown` times as long as with that decode: a few tokens would cost as
much, and a prompt would wait for the stream's end.

Both terms are estimated from past steps:

- `decode_s`, the time of the decodes alone, is the lower quartile over the latest steps with about
  as many decodes and no prompt tokens. The quartile ignores momentary disturbances of the machine.
- `token_s`, the cost of one prompt token, grows with the context before it; old measurements
  therefore decay within a few steps. The time of a few tokens, fewer than were allowed, is mostly
  that of the step: they change the estimate little.

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


class ChunkBudget:
    """Arithmetic without a clock: `tokens_allowed` before each step, `record` after it."""

    def __init__(self, slowdown: float = 0.0) -> None:
        """`slowdown` is at least 1; 0 sets no limit."""
        self._slowdown = slowdown
        self._decode_steps: deque[_DecodeStep] = deque(maxlen=MAX_MEASUREMENTS)
        self._line = _Line()
        self._prompt_seconds = 0.0  # decaying sum of seconds beyond the decodes' own
        self._prompt_tokens = 0.0  # decaying sum of the tokens that took them
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
        fitting = prompts_s * self._prompt_tokens
        if self._prompt_tokens and fitting >= most * self._prompt_seconds:
            return most
        by_cost = int(fitting / self._prompt_seconds) if self._prompt_seconds else 0
        self._allowed = min(most, max(MIN_TOKENS, by_cost))
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
        if decodes and self._prompt_tokens:  # caps the weight of a single slow step
            expected = tokens * self._prompt_seconds / self._prompt_tokens
            prompt_s = min(prompt_s, max(decode_s, 2 * expected))
        share = min(tokens / allowed, 1.0) if allowed else 1.0
        decay, weight = DECAY**share, share**2
        self._prompt_seconds = self._prompt_seconds * decay + prompt_s * weight
        self._prompt_tokens = self._prompt_tokens * decay + tokens * weight

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

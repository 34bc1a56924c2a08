"""How many prompt tokens a step takes beside its decodes, so that these hardly notice.

    alone(decodes) + cost * tokens  <=  slowdown * alone(decodes)

Where more wait than decode, prompts get as many times the decodes' time as there are of them for
each: one stream is no reason to keep thirty from beginning.

Both are learnt from the steps that were done. `alone` is what decodes take without prompts: the
lower quartile of the latest steps that had about as many of them and no prompts, so that what
hinders the machine for a moment is none of theirs. `cost` is what a prompt token adds; it grows
with what comes before it, so it is forgotten within a few steps.

What is not known is guessed too small, at the expense of prompts: fewer decodes than were measured
take their share of that, more take no longer. Where fewer than two steps tell, or none lately, the
next one is a probe: it has no prompt tokens. One step in `PROBE_EVERY` may be, and `PROBES` of them
in a row where the batch changes quickly.

Chunks of prompts beside decodes, as many tokens as the time between two tokens allows, are those of
Sarathi-Serve; there the budget is profiled beforehand, here it is found while serving.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

__all__ = ["LEAST", "ChunkBudget"]

# Prompt tokens of a step, also where it lasts too long then: one for each half of prefills and of
# sends. So nobody waits for ever, and alone a prompt of N tokens takes N / 4 steps at most.
LEAST = 4
PROBE_EVERY = 64  # steps
PROBES = 4
LATEST = 160  # steps back: two probes at least
REMEMBERED = 32  # of these, steps without prompts
ALIKE = 1.25  # numbers of decodes that differ by no more take about the same
FORGET = 0.5  # of what is known of the cost, with each step


class _Alone(NamedTuple):
    """A step that had decodes only."""

    step: int
    decodes: int
    seconds: float


class ChunkBudget:
    """Arithmetic without a clock: `took` is told of each step, `allowed` asked before one."""

    def __init__(self, slowdown: float = 0.0) -> None:
        """`slowdown` is 1 or more; 0: no limit."""
        self._slowdown = slowdown
        self._alone: deque[_Alone] = deque(maxlen=REMEMBERED)
        self._spent = 0.0  # seconds that prompt tokens took beyond the decodes, fading
        self._tokens = 0.0  # how many they were, fading likewise
        self._step = 0
        self._credit = float(PROBES)

    def allowed(self, decodes: int, waiting: int, most: int) -> int:
        """Prompt tokens, of so many that wait, for the next step, which has `decodes`: `most` at
        most. 0: a probe."""
        if not self._slowdown or not decodes:
            return most
        if self._credit >= 1 and not self._knows(decodes):
            self._credit -= 1
            return 0
        longer = max(self._slowdown - 1, waiting / decodes if waiting > decodes else 0.0)
        fitting = longer * self._seconds(decodes) * self._tokens
        if self._tokens and fitting >= most * self._spent:
            return most
        return min(most, max(LEAST, int(fitting / self._spent) if self._spent else 0))

    def took(self, decodes: int, tokens: int, seconds: float) -> None:
        """A step of `decodes` and `tokens` of prompts took `seconds`."""
        if not self._slowdown:
            return
        self._step += 1
        if not tokens:
            self._alone.append(_Alone(self._step, decodes, seconds))
            return
        self._credit = min(self._credit + 1 / PROBE_EVERY, PROBES)
        alone = self._seconds(decodes) if decodes else 0.0
        spent = max(seconds - alone, 0.0)
        if decodes and self._tokens:  # of a hiccup no more than this counts
            spent = min(spent, max(alone, 2 * tokens * self._spent / self._tokens))
        self._spent = self._spent * FORGET + spent
        self._tokens = self._tokens * FORGET + tokens

    def _alike(self, decodes: int) -> list[_Alone]:
        """The latest steps of about as many decodes and no prompts."""
        return [
            alone
            for alone in self._alone
            if self._step - alone.step < LATEST
            and decodes <= alone.decodes * ALIKE
            and alone.decodes <= decodes * ALIKE
        ]

    def _knows(self, decodes: int) -> bool:
        alike = self._alike(decodes)
        return len(alike) > 1 and self._step - alike[-1].step < PROBE_EVERY

    def _seconds(self, decodes: int) -> float:
        """What they would take alone; rather too little. 0: nothing is known."""
        known = sorted(
            alone.seconds * min(1.0, decodes / alone.decodes)
            for alone in self._alike(decodes) or self._alone
        )
        return known[(len(known) - 1) // 4] if known else 0.0

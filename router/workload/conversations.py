"""Conversations of several turns: prompts that share prefixes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

from router.workload.prompts import named_tokens
from router.workload.request import LoadRequest

__all__ = ["Conversations"]

# A session's next turn: its time, the session's number, the request, and the turns after it.
Next = tuple[float, int, LoadRequest, Iterator[LoadRequest]]


@dataclass(frozen=True, slots=True)
class Conversations:
    """Sessions with a common system prompt, whose turns repeat all that was said before.

        turn 1: system, new
        turn 2: system, new, answer, new
        turn 3: system, new, answer, new, answer, new

    Arrivals do not wait for answers, so the answers in the prompts are made up: a turn shares with
    its predecessor the predecessor's prompt, and not what a server answered to it.
    """

    system_tokens: int = 1024
    new_tokens: int = 128  # mean; uniform from half to one and a half of it
    answer_tokens: int = 128
    turns: int = 4  # mean; uniform from 1 to twice the mean, less one
    think_s: float = 10.0  # mean time from a turn's arrival to the next one's; exponential

    def requests(self, seed: int, starts: Iterator[float]) -> Iterator[LoadRequest]:
        """Yield the turns of sessions that begin at `starts` (s, ascending), in order of time."""
        running: list[Next] = []  # a heap
        for number, start in enumerate(starts):
            while running and running[0][0] <= start:
                yield _next_turn(running)
            turns = self._turns(seed, number, start)
            heappush(running, (start, number, next(turns), turns))
        while running:
            yield _next_turn(running)

    def _turns(self, seed: int, number: int, start: float) -> Iterator[LoadRequest]:
        session = f"conversation-{seed}-{number}"
        source, at_s = random.Random(session), start
        said = named_tokens(f"conversations {seed}", self.system_tokens)
        for turn in range(source.randint(1, 2 * self.turns - 1)):
            half = self.new_tokens // 2
            new = max(1, source.randint(self.new_tokens - half, self.new_tokens + half))
            said += named_tokens(f"{session} {turn}", new)
            body = {"prompt": list(said), "max_tokens": self.answer_tokens}
            yield LoadRequest(body, len(said), at_s, session)
            said += named_tokens(f"{session} answer {turn}", self.answer_tokens)
            at_s += source.expovariate(1 / self.think_s)


def _next_turn(running: list[Next]) -> LoadRequest:
    """Take the earliest turn; its session's next one takes its place."""
    _, number, request, turns = running[0]
    following = next(turns, None)
    if following is None:
        heappop(running)
    else:
        heapreplace(running, (following.at_s or 0.0, number, following, turns))
    return request

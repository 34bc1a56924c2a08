"""Generations that begin with another one's prompt: the further choices of one request.

    parent   submitted ────── prompt computed ────── ended ────── let go
    child        └─ waits here ─┘  └───────── forks at once ────────┘

The prompt is computed once, and its pages are shared; of a last page that is not full each has a
copy. A parent that has ended is kept for those that were announced and have not come yet.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from engine.scheduling.jobs import Generation
from engine.scheduling.scheduler import Scheduler
from kvcache.cache import KVCache
from kvcache.errors import NoCapacity

__all__ = ["Forks"]

KEEP_S = 5.0  # children come within milliseconds, or never


@dataclass(slots=True)
class _Family:
    parent: Generation
    expected: int  # children that have not come yet
    waiting: list[Generation] = field(default_factory=list)  # for the prompt to be computed
    until: float | None = None  # the parent has ended, and its sequence is kept until then


class Forks:
    """Used by the step loop's thread only; hands to the scheduler whoever can go on.

    A child whose parent is unknown, has another prompt, or was preempted, and one for which there
    is no room just now, waits for its turn as any other generation.
    """

    def __init__(self, cache: KVCache, scheduler: Scheduler) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._families: dict[str, _Family] = {}  # by the parent's request id

    @property
    def waiting(self) -> int:
        """Children that wait for their parent's prompt."""
        return sum(len(family.waiting) for family in list(self._families.values()))

    @property
    def keeping(self) -> bool:
        """Whether `sweep` is to be called."""
        return any(family.until is not None for family in self._families.values())

    def add(self, job: Generation) -> None:
        """Take on a new generation, parent, child or neither."""
        if job.forks and job.request_id not in self._families:
            self._families[job.request_id] = _Family(job, job.forks)
        family = None if job.fork_of is None else self._families.get(job.fork_of)
        if family is None or family.parent is job:
            self._scheduler.add(job)
            return
        family.expected -= 1
        if family.until is None and family.parent.generated == 0:
            family.waiting.append(job)
            return
        self._start(family.parent, job)
        if family.until is not None and family.expected <= 0:
            self._let_go(family)

    def computed(self, parent: Generation) -> None:
        """`parent` is about to draw its first token here: those that wait can go on."""
        family = self._families.get(parent.request_id)
        if family is not None and family.parent is parent:
            waiting, family.waiting = family.waiting, []
            for child in waiting:
                self._start(parent, child)

    def keep(self, parent: Generation) -> bool:
        """`parent` ends. Returns whether its sequence is wanted yet, and no longer its own."""
        family = self._families.get(parent.request_id)
        if family is None or family.parent is not parent or family.expected <= 0:
            return False
        if self._cache.length(parent.seq_id) < parent.prompt_len:
            return False
        family.until = time.monotonic() + KEEP_S
        return True

    def forget(self, job: Generation) -> None:
        """`job` has ended or failed. Its children go on without it."""
        if job.fork_of is not None and (family := self._families.get(job.fork_of)) is not None:
            family.waiting = [child for child in family.waiting if child is not job]
        family = self._families.get(job.request_id)
        if family is not None and family.parent is job and family.until is None:
            del self._families[job.request_id]
            for child in family.waiting:
                self._scheduler.add(child)

    def sweep(self) -> None:
        """Let go of the sequences that were kept long enough."""
        now = time.monotonic()
        for family in list(self._families.values()):
            if family.until is not None and family.until < now:
                self._let_go(family)

    def _start(self, parent: Generation, child: Generation) -> None:
        """Fork `child` from `parent` if that can be, and hand it to the scheduler."""
        length = min(parent.prompt_len, child.target - 1)  # its last token is to be computed
        same = child.tokens[:length] == parent.tokens[:length]
        # A sequence that is kept counts as its parent's no longer, but it is there.
        here = parent.started or self._families[parent.request_id].until is not None
        if not child.started and same and here and not self._scheduler.full:
            self._fork(parent, child, length)
        self._scheduler.add(child)

    def _fork(self, parent: Generation, child: Generation, length: int) -> None:
        cache = self._cache
        if cache.length(parent.seq_id) < length:
            return  # it was preempted, and computes its prompt again
        try:
            cache.fork_sequence(parent.seq_id, child.seq_id, length)
        except NoCapacity:
            return
        try:
            cache.grow(child.seq_id, child.target)
        except NoCapacity:
            cache.remove_sequence(child.seq_id)
            return
        child.begin = child.cached = length
        child.started = True

    def _let_go(self, family: _Family) -> None:
        del self._families[family.parent.request_id]
        self._cache.remove_sequence(family.parent.seq_id)

"""Which tokens of which jobs the next step computes.

Continuous batching under a token budget. Every step takes, in this order:

1. one token of each running decode, so that neither prefills nor sends ever delay a decode by more
   than one budget's worth of compute;
2. chunks of prefills and of sends, first come first served within each kind. While both kinds wait,
   each gets half of what is left: sends do not starve prefills, nor the other way round.

A job takes the pages of its whole prompt when it starts: a started prefill never waits for pages.
Decodes grow page by page; when there are none left, the youngest generation makes room: its pages
go to a tier, and it waits at the head of the queue for room to bring them back. Where no tier takes
them, the full ones go to the prefix cache, and it computes the rest again. What it has drawn it
keeps, so nothing is repeated. Nobody else makes way while pages are on their way, one direction or
the other, so the oldest generation always progresses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from engine.job import Generation, Job, Send
from engine.runner import Chunk
from kvcache.cache import KVCache
from kvcache.errors import NoCapacity

__all__ = ["Scheduler"]


class Scheduler:
    """The queues. Used by the step loop's thread only; `len`s are safe to read from others."""

    def __init__(
        self, cache: KVCache, *, token_budget: int, max_batch: int, swap: bool = True
    ) -> None:
        """With `swap`, tiers take the pages of who makes room, as long as they have any."""
        self.wake: Callable[[], object] = lambda: None  # `plan` may find more to do, from now on
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []  # started, in the order of arrival
        self.sends: list[Send] = []
        self.preemptions = 0
        self._cache = cache
        self._budget = token_budget
        self._max_batch = max_batch
        self._swap = swap
        # Of those that wait, whose sequences a tier has: until they are out, and until they return.
        self._leaving: dict[Generation, Future[int]] = {}
        self._returning: dict[Generation, Future[int]] = {}
        self._untouched: set[Generation] = set()  # begun, but nothing of them is computed yet

    @property
    def full(self) -> bool:
        """Whether what is not started has to wait."""
        return len(self.running) >= self._max_batch

    def add(self, job: Job) -> None:
        """A new job. A generation that is started already (from a lease) runs at once."""
        if isinstance(job, Send):
            self.sends.append(job)
        elif job.started:
            self.running.append(job)
        else:
            self.waiting.append(job)

    def remove(self, job: Job) -> None:
        """Forget a job, wherever it is; its sequence is the caller's business if it is started."""
        if isinstance(job, Send):
            if job in self.sends:
                self.sends.remove(job)
        elif job in self.running:
            self.running.remove(job)
            self._untouched.discard(job)
        elif job in self.waiting:
            self.waiting.remove(job)
            if self._leaving.pop(job, None) or self._returning.pop(job, None):
                self._cache.remove_sequence(job.seq_id)

    def plan(self) -> list[tuple[Job, Chunk]]:
        """The next step's chunks, with room made for each; empty if there is nothing to do."""
        waited = set(self._untouched)
        self._admit()
        chosen: list[tuple[Job, Chunk]] = []
        for decode in list(self.running):
            if self._missing(decode) == 1 and self._make_room(decode):
                chosen.append((decode, self._chunk(decode, 1)))
        budget = max(self._budget - len(chosen), 2)
        prefills = [job for job in self.running if self._missing(job) > 1]
        sends = [job for job in self.sends if self._missing(job) > 0]
        share = budget // 2 if prefills and sends else budget
        for job in _alternating(prefills, sends):
            if budget <= 0:
                break
            if not self._make_room(job):
                continue
            if isinstance(job, Generation):
                if job in waited:
                    self._catch_up(job)
                self._untouched.discard(job)
                # What is computed of a prompt can be shared, and copied to a tier, from now on.
                self._cache.publish(job.seq_id, job.tokens)
            count = min(self._missing(job), budget, share)
            chosen.append((job, self._chunk(job, count)))
            budget -= count
        # Making room for one may have preempted another that was chosen before.
        return [(job, chunk) for job, chunk in chosen if job.started]

    def _admit(self) -> None:
        for job, returned in list(self._returning.items()):
            if returned.done():
                del self._returning[job]
                self._run(job)
        while self.waiting and not self.full:
            job = self.waiting[0]
            if job in self._leaving:
                self._bring_back(job)
                return
            if job in self._returning or not self._begin(job):
                return
            self._run(job)

    def _run(self, job: Generation) -> None:
        job.started = True
        self.waiting.remove(job)
        self.running.append(job)

    def _begin(self, job: Generation) -> bool:
        """A sequence, with room, for a generation that has none; whether there was room."""
        with self._cache.lock:
            cached = self._cache.add_sequence(job.seq_id, job.tokens[:-1])
            try:
                self._cache.grow(job.seq_id, job.target)
            except NoCapacity:
                self._cache.remove_sequence(job.seq_id)
                return False
        if job.begin is None:  # afterwards, what it finds again is its own
            job.begin = job.cached = cached
            self._untouched.add(job)
        return True

    def _catch_up(self, job: Generation) -> None:
        """Begin with what others have computed of its prompt while it waited for its first chunk.

        Prompts that come at once often begin alike: the first one computes that part for all.
        """
        cache = self._cache
        with cache.lock:
            cache.remove_sequence(job.seq_id)
            job.begin = job.cached = cache.add_sequence(job.seq_id, job.tokens[:-1])
            cache.grow(job.seq_id, job.target)  # it has let go of at least as much

    def _bring_back(self, job: Generation) -> None:
        """Swap a generation in if it is out and there is room; what was lost it computes again."""
        if not self._leaving[job].done():
            return
        try:
            returned = self._cache.swap_in(job.seq_id, job.target)
        except NoCapacity:
            return
        del self._leaving[job]
        self._returning[job] = returned
        returned.add_done_callback(lambda _: self.wake())

    def _missing(self, job: Job) -> int:
        """Tokens to compute before the job can draw, or has sent everything."""
        return job.target - self._cache.length(job.seq_id) if job.started else 0

    def _chunk(self, job: Job, count: int) -> Chunk:
        start = self._cache.length(job.seq_id)
        stop = start + count
        draws = isinstance(job, Generation) and stop == job.target
        return Chunk(job.seq_id, job.tokens[start:stop], draws)

    def _make_room(self, job: Job) -> bool:
        """Pages for all the job has to compute; the youngest generations make way if need be."""
        while job.started:
            try:
                self._cache.grow(job.seq_id, job.target)
            except NoCapacity:
                if not self.running or self._moving:
                    return False
                self._preempt(self.running[-1])
            else:
                return True
        return False

    @property
    def _moving(self) -> bool:
        """Whether pages are on their way: there will be room, or another one to make room."""
        return bool(self._returning) or not all(out.done() for out in self._leaving.values())

    def _preempt(self, job: Generation) -> None:
        if not (self._swap and self._swap_out(job)):
            self._cache.publish(job.seq_id, job.tokens)
            self._cache.remove_sequence(job.seq_id)
        self.running.remove(job)
        self._untouched.discard(job)
        job.started = False
        self.waiting.appendleft(job)
        self.preemptions += 1

    def _swap_out(self, job: Generation) -> bool:
        try:
            out = self._cache.swap_out(job.seq_id)
        except NoCapacity:
            return False
        self._leaving[job] = out
        out.add_done_callback(lambda _: self.wake())
        return True


def _alternating(prefills: list[Generation], sends: list[Send]) -> Iterator[Job]:
    """One of each in turn, then the rest of the longer list."""
    for index in range(max(len(prefills), len(sends))):
        yield from prefills[index : index + 1]
        yield from sends[index : index + 1]

"""Which tokens of which jobs the next step computes.

Continuous batching under a token budget. Every step takes, in this order:

1. one token of each running decode, so that neither prefills nor sends ever keep a decode out;
2. chunks of prefills and of sends, as many tokens as the budget leaves and the pace allows, which
   is how much longer a step may take than its decodes alone. While both kinds wait, each gets half:
   sends do not starve prefills, nor the other way round. Decodes starve neither: `LEAST` tokens are
   always left (`engine.scheduling.chunk_budget`).

Of what a kind gets, n tokens a step, half goes to the oldest job and half to the one with the least
left, so that short prompts pass long ones and these go on. One with r tokens left is done

- within ceil(r' / (n / 2)) steps, r' being r and at most r of each other job that gets as short;
- within the sum of ceil(r / (n / 2)) over itself and those that are older;

whichever is earlier, counted from when it has its pages. No stream of short prompts keeps a long
one from its half, and no long prompts, however many, keep a short one waiting.

Priorities come first: lower is earlier, in the queue, in both halves and, the other way round, in
who makes room. Nothing is promised to those that are later while others of a lower number come.

A job takes the pages of its whole prompt when it starts: a started prefill never waits for pages.
Decodes grow page by page; when there are none left, the youngest generation of the last priority
makes room: its pages go to a tier, and it waits at the head of its priority for room to bring them
back. Where no tier takes them, the full ones go to the prefix cache, and it computes the rest
again. What it has drawn it keeps, so nothing is repeated. Nobody else makes way while pages are on
their way, one direction or the other, so the oldest of the first priority always progresses.
"""

from __future__ import annotations

from bisect import bisect_left, insort_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from engine.execution.model_runner import Chunk
from engine.scheduling.chunk_budget import ChunkBudget
from engine.scheduling.jobs import Generation, Job, Send
from kvcache.cache import KVCache
from kvcache.errors import NoCapacity

__all__ = ["Scheduler"]


class Scheduler:
    """The queues. Used by the step loop's thread only; `len`s are safe to read from others."""

    def __init__(
        self,
        cache: KVCache,
        *,
        token_budget: int,
        max_batch: int,
        swap: bool = True,
        decode_slowdown: float = 0.0,
    ) -> None:
        """With `swap`, a preempted job's pages move to a tier while one has room.

        `ChunkBudget` explains `decode_slowdown`.
        """
        self.wake: Callable[[], object] = lambda: None  # `plan` may find more to do, from now on
        # Each by priority; of one priority in the order of arrival.
        self.waiting: list[Generation] = []
        self.running: list[Generation] = []  # started
        self.sends: list[Send] = []
        self.preemptions = 0
        self._cache = cache
        self._budget = token_budget
        self._max_batch = max_batch
        self._swap = swap
        self._pace = ChunkBudget(decode_slowdown)
        self._planned = (0, 0)  # decodes and prompt tokens of the latest plan
        # Of those that wait, whose sequences a tier has: until they are out, and until they return.
        self._leaving: dict[Generation, Future[int]] = {}
        self._returning: dict[Generation, Future[int]] = {}
        self._untouched: set[Generation] = set()  # begun, but nothing of them is computed yet
        self._unpublished: list[Generation] = []  # whose prompts the latest step went on with

    @property
    def full(self) -> bool:
        """Whether what is not started has to wait."""
        return len(self.running) >= self._max_batch

    def add(self, job: Job) -> None:
        """A new job. A generation that is started already (from a lease) runs at once."""
        if isinstance(job, Send):
            insort_right(self.sends, job, key=_priority)
        elif job.started:
            insort_right(self.running, job, key=_priority)
        else:
            insort_right(self.waiting, job, key=_priority)

    def remove(self, job: Job) -> None:
        """Forget a job, wherever it is; its sequence is the caller's business if it is started."""
        if isinstance(job, Send):
            if job in self.sends:
                self.sends.remove(job)
        elif job in self.running:
            self.running.remove(job)
            self._untouched.discard(job)
            if job in self._unpublished:
                self._unpublished.remove(job)
        elif job in self.waiting:
            self.waiting.remove(job)
            if self._leaving.pop(job, None) or self._returning.pop(job, None):
                self._cache.remove_sequence(job.seq_id)

    def plan(self) -> list[tuple[Job, Chunk]]:
        """The next step's chunks, with room made for each; empty if there is nothing to do."""
        self._publish()
        waited = set(self._untouched)
        self._admit()
        chosen: list[tuple[Job, Chunk]] = []
        for decode in list(self.running):
            if self._missing(decode) == 1 and self._make_room(decode):
                chosen.append((decode, self._chunk(decode, 1)))
        decodes = len(chosen)
        for job, count in self._prompts(decodes, waited).items():
            if isinstance(job, Generation):
                self._untouched.discard(job)
                self._unpublished.append(job)
            chosen.append((job, self._chunk(job, count)))
        # Making room for one may have preempted another that was chosen before.
        self._planned = (
            sum(job.started for job, _ in chosen[:decodes]),
            sum(len(chunk.tokens) for job, chunk in chosen[decodes:] if job.started),
        )
        return [(job, chunk) for job, chunk in chosen if job.started]

    def took(self, seconds: float) -> None:
        """The step that was planned last took so long."""
        self._pace.took(*self._planned, seconds)

    def _publish(self) -> None:
        """What is computed of a prompt can be shared, and copied to a tier, from now on."""
        for job in self._unpublished:
            if job.started:
                self._cache.publish(job.seq_id, job.tokens)
        self._unpublished.clear()

    def _prompts(self, decodes: int, waited: set[Generation]) -> dict[Job, int]:
        """How many tokens of which prefills and sends go with so many decodes."""
        prefills = [job for job in self.running if self._missing(job) > 1]
        sends = [job for job in self.sends if self._missing(job) > 0]
        if not prefills and not sends:
            return {}
        waiting = len(prefills) + len(sends)
        budget = self._pace.allowed(decodes, waiting, max(self._budget - decodes, 2))
        half = budget // 2 if sends else 0
        wanted = sum(map(self._missing, sends))
        chosen = self._divide(prefills, budget - min(half, wanted), waited)
        return chosen | self._divide(sends, budget - sum(chosen.values()), waited)

    def _divide(self, jobs: Sequence[Job], budget: int, waited: set[Generation]) -> dict[Job, int]:
        """Of jobs of one kind, in the order of arrival: half to the first one, the rest to those
        with the least left. What one does not need is for the next."""
        chosen: dict[Job, int] = {}
        least = sorted(jobs, key=lambda job: (job.priority, self._missing(job)))
        for turn, job in enumerate([*jobs[:1], *least]):
            if budget <= 0:
                break
            worker, count = self._worker(job, jobs, waited)
            if not self._make_room(worker):
                continue
            count = min(count - chosen.get(worker, 0), budget if turn else budget - budget // 2)
            if count > 0:
                chosen[worker] = chosen.get(worker, 0) + count
                budget -= count
        return chosen

    def _worker(self, job: Job, jobs: Sequence[Job], waited: set[Generation]) -> tuple[Job, int]:
        """Who computes what `job` needs next, and how many tokens of it.

        Prompts that come at once often begin alike. The first one computes that part for all: in
        place of those that have nothing yet, which then begin with what it has computed.
        """
        if job not in self._untouched or not isinstance(job, Generation):
            return job, self._missing(job)
        if job in waited:
            self._catch_up(job)
        length, earlier = self._cache.length(job.seq_id), True
        for other in jobs:
            if other is job:
                earlier = False
            elif other.started and (earlier or other not in self._untouched):
                common = self._common(job, other)
                if common > max(length, self._cache.length(other.seq_id)):
                    return other, common - self._cache.length(other.seq_id)
        return job, self._missing(job)

    def _common(self, job: Job, other: Job) -> int:
        """Tokens of the full pages that both begin with, but for the last token of `job`."""
        page = self._cache.layout.page_size
        limit = min(len(job.tokens) - 1, len(other.tokens)) // page * page
        for begin in range(0, limit, page):
            if job.tokens[begin : begin + page] != other.tokens[begin : begin + page]:
                return begin
        return limit

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
        insort_right(self.running, job, key=_priority)

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
        """Begin with what others have computed of its prompt while it waited for a first chunk."""
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
        """Pages for all the job has to compute; the last generations make way if need be."""
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
        self.waiting.insert(bisect_left(self.waiting, job.priority, key=_priority), job)
        self.preemptions += 1

    def _swap_out(self, job: Generation) -> bool:
        try:
            out = self._cache.swap_out(job.seq_id)
        except NoCapacity:
            return False
        self._leaving[job] = out
        out.add_done_callback(lambda _: self.wake())
        return True


def _priority(job: Job) -> int:
    return job.priority

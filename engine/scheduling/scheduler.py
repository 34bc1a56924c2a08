"""The scheduler chooses the jobs, and their tokens, that the next step computes.

Continuous batching under a token budget. Every step takes, in this order:

1. One token of each running decode: neither prefills nor sends ever delay a decode.
2. Chunks of prefills and of sends. Their number of tokens is bounded by what the token budget
   leaves and by how much longer than its decodes alone a step may take. While both kinds wait, each
   gets half, so neither starves the other. Decodes starve neither: `MIN_TOKENS` are always left
   (`engine.scheduling.chunk_budget`).

Each kind splits its n tokens a step in two halves. One half goes to the oldest job, the other to
the job with the least tokens left, so that short prompts pass long ones while long ones progress.
Counted from the moment it has its pages, a job with r tokens left is done within

- ceil(r' / (n / 2)) steps, where r' is r plus, for each other job that at some time has no more
  tokens left than this one, at most r; or
- the sum of ceil(r / (n / 2)) over itself and all older jobs;

whichever is earlier. No stream of short prompts takes a long prompt's half, and no number of long
prompts delays a short one.

Priorities precede all of this: a lower number comes first in the queue and in both halves, and is
preempted last. There is no guarantee for a job while jobs with lower numbers keep arriving.

A job allocates the pages of its whole prompt when it starts: a started prefill never waits for
pages. Decodes grow page by page. If no page is left, the youngest generation of the last priority
is preempted: its pages move to a tier, and it waits at the head of its priority for room to bring
them back. If no tier takes them, its full pages go to the prefix cache and it computes the rest
again. It keeps its sampled tokens, so no token is delivered twice. No other job is preempted while
pages move in either direction, so the oldest job of the first priority always progresses.

On an engine that borrows, a generation may outgrow the pool, and where others lend, generations
that outgrow it together move blocks there before one is preempted:
`engine.scheduling.long_generations`.

Pages that are lent to other engines are called back before any generation is preempted, and as soon
as the head of the queue finds no room. They come back later, so the preemption does not wait.
"""

from __future__ import annotations

from bisect import bisect_left, insort_right
from collections import Counter
from collections.abc import Callable, Sequence

from engine.scheduling.chunk import Chunk
from engine.scheduling.chunk_budget import ChunkBudget
from engine.scheduling.jobs import Generation, Job, Send
from engine.scheduling.long_generations import LongGenerations, ShipLimits
from engine.scheduling.shared_prefixes import SharedPrefixes
from engine.scheduling.step_limits import StepLimits
from engine.scheduling.swapped import SwappedGenerations
from kvcache.errors import NoCapacity
from kvcache.sequences import SequenceCache

__all__ = ["Scheduler"]

# With several stages, a step takes at most this share of the longest prompt, or a short chunk.
CHUNKS = 4  # for each stage
SHORT_CHUNK = 64  # tokens


class Scheduler:
    """The queues. Used by the step loop's thread only; other threads may read their lengths."""

    def __init__(
        self,
        cache: SequenceCache,
        *,
        token_budget: int,
        max_batch: int,
        swap: bool = True,
        decode_slowdown: float = 0.0,
        depth: int = 1,
        limits: StepLimits | None = None,
        ship: ShipLimits | None = None,
    ) -> None:
        """With `swap`, a preempted job's pages move to a tier that has room.

        `token_budget` and `max_batch` bound a step's tokens and sequences; `ChunkBudget` explains
        `decode_slowdown`. With `depth` steps under way at a time, as in a pipeline of stages, each
        takes that share of the decodes; the chunks of a prompt follow each other through the
        stages, and are short enough for that. `ended` says when a step has ended. `limits` bound
        what a step has besides. `ship` bounds what it asks of creditors.
        """
        # Called on any thread when `plan` may find new work.
        self.wake: Callable[[], object] = lambda: None
        # Each sorted by priority, then by arrival.
        self.waiting: list[Generation] = []
        self.running: list[Generation] = []  # started
        self.sends: list[Send] = []
        self.preemptions = 0
        self._cache = cache
        self._budget = token_budget
        self._max_batch = max_batch
        self._swap = swap
        self.depth = depth
        self._limits = limits
        self._in_flight: Counter[Job] = Counter()  # steps under way with the job, if several are
        self._held: set[Job] = set()  # in no further step, because they end
        self._giving_way: set[Job] = set()  # not in the next step, so that they can be preempted
        self._chunk_budget = ChunkBudget(decode_slowdown)
        self.planned = (0, 0)  # decodes and prompt tokens of the latest plan
        self._swapped = SwappedGenerations(cache, lambda: self.wake())  # all are in `waiting`
        self._shared = SharedPrefixes(cache, self._missing)
        self._long = LongGenerations(cache, lambda: self.wake(), ship or ShipLimits())
        self._unpublished: list[Generation] = []  # prefilled by the latest step
        self._blocked: Generation | None = None  # the head of the queue, if it finds no room

    @property
    def full(self) -> bool:
        """Whether the batch is full, so that new generations wait."""
        return len(self.running) >= self._max_batch

    def is_long(self, job: Job) -> bool:
        """Whether a generation may have blocks at creditors: it takes room step by step."""
        return job in self._long

    @property
    def blocked(self) -> bool:
        """Whether the head of the queue found no room in the latest plan."""
        return self._blocked is not None

    @property
    def stuck(self) -> Generation | None:
        """The head of the queue if it finds no room although no other job holds pages.

        Leases, pins, quarantine, retained sequences and loans hold them. Loans that were called
        back end by themselves, so it is not stuck before. Also the first of the running, if it is
        long and waits for blocks that do not come.
        """
        if self.running and self._long.stuck(self.running[0]):
            return self.running[0]
        busy = self.running or self.sends or self._swapped.moving or self._cache.awaits_pages
        return None if busy else self._blocked

    @property
    def waits_for_room(self) -> bool:
        """Whether a generation waits for room: time that passes makes a difference."""
        return bool(self.waiting) or self._long.waits

    def sweep(self) -> None:
        """Note that some time has passed."""
        self._long.sweep()

    def drop_swap(self, job: Generation) -> bool:
        """Have a swapped generation computed again; return False if it was not swapped out.

        It then shares the pages of its cached prefix, while a swapped sequence needs all its own.
        """
        swapped = job in self._swapped
        self._swapped.remove(job)
        return swapped

    def add(self, job: Job) -> None:
        """Add a job. A generation that is already started (from a lease) runs at once."""
        if isinstance(job, Send):
            insort_right(self.sends, job, key=_priority)
        elif job.started:
            insort_right(self.running, job, key=_priority)
        else:
            insort_right(self.waiting, job, key=_priority)

    def remove(self, job: Job) -> None:
        """Remove a job from all queues. The caller removes the sequence of a started job."""
        self._held.discard(job)
        if self._limits is not None:
            self._limits.forget(job)
        if isinstance(job, Send):
            if job in self.sends:
                self.sends.remove(job)
        elif job in self.running:
            self.running.remove(job)
            self._long.forget(job)
            self._shared.untouched.discard(job)
            self.published(job)
        elif job in self.waiting:
            self.waiting.remove(job)
            self._swapped.remove(job)
            if job is self._blocked:
                self._set_blocked(None)

    def plan(self) -> list[tuple[Job, Chunk]]:
        """Return the next step's chunks, with pages for each; empty if there is nothing to do."""
        self._publish()
        self._giving_way.clear()
        self._long.begin_plan(self.running)
        waited = set(self._shared.untouched)
        self._admit()
        decodes: list[tuple[Generation, Chunk]] = []
        prefills: list[Generation] = []
        elsewhere = 0  # decodes in other steps
        length_of, page_size = self._cache.planned_length, self._cache.page_size
        for generation in list(self.running):
            if not generation.started or generation in self._held:
                continue  # preempted for one before it, or about to end
            length = length_of(generation.seq_id)
            if (missing := len(generation.tokens) - length) > 1:
                prefills.append(generation)
            elif missing == 0:  # it is in a step under way
                elsewhere += 1
            # The last page of a sequence has room unless it is full.
            elif length % page_size or self._make_room(generation):
                last = generation.tokens[length:]
                decodes.append((generation, Chunk(generation.seq_id, last, sample=True)))
        share = -(-(len(decodes) + elsewhere) // self.depth)
        prefills = [job for job in prefills if job not in self._giving_way]
        counts = self._prompts(prefills, min(len(decodes), share), waited)
        # Allocating pages for a later job may have preempted one that was chosen before.
        decodes = [(job, chunk) for job, chunk in decodes if job.started]
        decodes, counts = self._long.fit(decodes, counts)
        if self._limits is not None:
            decodes, counts = self._limits.fit(decodes, share, counts)
        else:
            decodes = decodes[:share]
        prompts = [(job, self._chunk(job, count)) for job, count in counts.items() if job.started]
        for job, _ in prompts:
            if isinstance(job, Generation):
                self._shared.untouched.discard(job)
                if job not in self._unpublished:
                    self._unpublished.append(job)
        self._long.end_plan(self._blocked, self.running, waiting=bool(self.waiting))
        self.planned = len(decodes), sum(len(chunk.tokens) for _, chunk in prompts)
        plan: list[tuple[Job, Chunk]] = [*decodes, *prompts]
        if self.depth > 1:
            self._in_flight.update(job for job, _ in plan)
        return plan

    def in_flight(self, job: Job) -> bool:
        """Whether a job is in a step under way, if several are. Its sequence must stay then."""
        return job in self._in_flight

    def hold(self, job: Job) -> None:
        """Plan no further steps of a job that ends when those under way have ended."""
        self._held.add(job)

    def ended(self, plan: Sequence[tuple[Job, Chunk]]) -> None:
        """Note that a step has ended, of several that are under way at a time."""
        if self.depth > 1:
            self._in_flight.subtract(job for job, _ in plan)
            self._in_flight = +self._in_flight

    def record_steps(
        self, durations: Sequence[float], planned: tuple[int, int] | None = None
    ) -> None:
        """Learn how long, in seconds, a step took each time that it was computed.

        `planned` are its decodes and prompt tokens; by default, those of the step planned last. A
        step with prompts is computed once.
        """
        decodes, tokens = planned or self.planned
        if tokens:
            self._chunk_budget.record(decodes, tokens, *durations)
        else:
            self._chunk_budget.record_decodes(decodes, durations)

    def published(self, job: Generation) -> None:
        """Note that the pages that the latest step has computed of a job are shared already."""
        if job in self._unpublished:
            self._unpublished.remove(job)

    def _publish(self) -> None:
        """Share the prompt pages that the latest step computed; tiers may copy them from now on."""
        for job in self._unpublished:
            self._cache.publish(job.seq_id, job.tokens)
        self._unpublished = [job for job in self._unpublished if job in self._in_flight]

    def _prompts(
        self, prefills: Sequence[Generation], decodes: int, waited: set[Generation]
    ) -> dict[Job, int]:
        """Return the prefills and sends that join `decodes` decodes, with their token counts."""
        sends = [job for job in self.sends if self._missing(job) > 0 and job not in self._held]
        if not prefills and not sends:
            return {}
        waiting = len(prefills) + len(sends)
        most = max(self._budget - decodes, 2)
        if self.depth > 1:  # so that the stages compute a prompt at the same time
            jobs: list[Job] = [*prefills, *sends]
            longest = max(job.target for job in jobs)
            most = min(most, max(-(-longest // (CHUNKS * self.depth)), SHORT_CHUNK))
        budget = self._chunk_budget.tokens_allowed(decodes, waiting, most)
        half = budget // 2 if sends else 0
        wanted = sum(map(self._missing, sends))
        chosen = self._divide(prefills, budget - min(half, wanted), waited)
        return chosen | self._divide(sends, budget - sum(chosen.values()), waited)

    def _divide(self, jobs: Sequence[Job], budget: int, waited: set[Generation]) -> dict[Job, int]:
        """Divide `budget` tokens among jobs of one kind, given in the order of arrival.

        Half goes to the first job, the rest to the jobs with the least left. What one job does not
        need goes to the next.
        """
        chosen: dict[Job, int] = {}
        least = sorted(jobs, key=lambda job: (job.priority, self._missing(job)))
        for place, job in enumerate([*jobs[:1], *least]):
            if budget <= 0:
                break
            leader, missing = self._shared.leader(job, jobs, waited)
            count = chosen.get(leader, 0)
            more = min(missing - count, budget if place else budget - budget // 2)
            if not (room := self._make_room(leader, count + more)):
                continue
            more = min(more, room - count)
            if more > 0:
                chosen[leader] = count + more
                budget -= more
        return chosen

    def _admit(self) -> None:
        for job in self._swapped.returned():
            self._run(job)
        blocked = None
        while self.waiting and not self.full:
            job = self.waiting[0]
            swapped = job in self._swapped
            if not (self._swapped.swap_in(job) if swapped else self._begin(job)):
                blocked = job
            if swapped or blocked is not None:
                break
            self._run(job)
        self._set_blocked(blocked)
        if blocked is not None:
            self._cache.call_back(self._at_start(blocked))
            if not self._long.outgrows(blocked):
                self._long.press(blocked.target)

    def _set_blocked(self, job: Generation | None) -> None:
        """Note the head of the queue if it finds no room; reserve its pages."""
        if job is not self._blocked:
            self._blocked = job
            self._cache.reserve(self._at_start(job) if job is not None else 0)

    def _at_start(self, job: Generation) -> int:
        """Return how many tokens a waiting generation needs room for."""
        elsewhere = self._cache.elsewhere
        if elsewhere is not None and self._long.outgrows(job):
            return elsewhere.block_tokens
        return job.target

    def _run(self, job: Generation) -> None:
        job.started = True
        self.waiting.remove(job)
        insort_right(self.running, job, key=_priority)

    def _begin(self, job: Generation) -> bool:
        """Create a generation's sequence with pages for it; return whether there was room."""
        alone = not (self.running or self.sends or self._swapped.moving)
        if self._long.outgrows(job):
            return self._long.begin(job, alone=alone)
        with self._cache.lock:
            cached = self._cache.add_sequence(job.seq_id, job.tokens[:-1])
            try:
                self._cache.grow(job.seq_id, job.target)
            except NoCapacity:
                self._cache.remove_sequence(job.seq_id)
                return alone and self._long.begin(job, alone=False)
        if job.begin is None:  # later, after a preemption, it finds its own tokens again
            job.begin = job.cached = cached
            self._shared.untouched.add(job)
        return True

    def _missing(self, job: Job) -> int:
        """Return the tokens to compute before the job can sample, or has sent everything."""
        return job.target - self._cache.planned_length(job.seq_id) if job.started else 0

    def _chunk(self, job: Job, count: int) -> Chunk:
        start = self._cache.planned_length(job.seq_id)
        stop = start + count
        sample = isinstance(job, Generation) and stop == job.target
        return Chunk(job.seq_id, job.tokens[start:stop], sample)

    def _make_room(self, job: Job, count: int = 1) -> int:
        """Allocate pages for all the job has to compute, preempting the last generations if needed.

        Returns how many of its next `count` tokens have room: all or none, but of a long
        generation. None have if the job itself was preempted. A generation in a step under way is
        preempted when that has ended; no generation before it is.
        """
        called_back = False
        while job.started:
            if isinstance(job, Generation) and job in self._long:
                return self._make_room_for_long(job, count)
            try:
                self._cache.grow(job.seq_id, job.target)
            except NoCapacity:
                if not called_back:  # this may free loans past their deadline
                    called_back = True
                    self._cache.call_back(self._missing(job))
                    continue
                if not self.running or self._swapped.moving:
                    return 0
                if self._long.make_room(job, self.running):
                    return 0
                last = self.running[-1]
                if last in self._in_flight:
                    self._giving_way.add(last)
                    return 0
                alone = len(self.running) == 1 and not self.sends
                if last is not job or not self._long.adopt(job, alone=alone):
                    self._preempt(last)
            else:
                return count
        return 0

    def _make_room_for_long(self, job: Generation, count: int) -> int:
        """Return how many of a long generation's next tokens have room.

        It preempts others only if it has waited for blocks in vain, or fits the pool.
        """
        while not (found := self._long.room(job, count)):
            self._cache.call_back(1)
            patient = self._long.patient(job)
            others = self.running[self.running.index(job) + 1 :] if patient else self.running
            if self._long.make_room(job, others):
                return 0
            last = self.running[-1]
            if last is job or self._swapped.moving or not self._long.impatient(job):
                return 0
            self._preempt(last)
        return found

    def _preempt(self, job: Generation) -> None:
        if not (self._swap and self._swapped.swap_out(job)):
            self._cache.publish(job.seq_id, job.tokens)
            self._cache.remove_sequence(job.seq_id)
        self._long.forget(job)
        self.running.remove(job)
        self._shared.untouched.discard(job)
        job.started = False
        self.waiting.insert(bisect_left(self.waiting, job.priority, key=_priority), job)
        self.preemptions += 1


def _priority(job: Job) -> int:
    return job.priority

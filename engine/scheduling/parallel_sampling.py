"""Parallel sampling: generations that share the prompt of another one, the choices of a request.

    parent   submitted ────── prompt computed ────── ended ────── removed
    child        └─ waits here ─┘  └───────── forks at once ────────┘

The prompt is computed once and its full pages are shared; each generation has its own copy of a
partial last page. The sequence of an ended parent is retained for announced children that have not
arrived yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.scheduling.jobs import Generation
from engine.scheduling.scheduler import Scheduler
from kvcache.errors import NoCapacity, Unsupported
from kvcache.sequences import SequenceCache

__all__ = ["ParallelSampling"]

RETAIN_S = 5.0  # children arrive within milliseconds or never


@dataclass(slots=True)
class _SharedPrompt:
    """A prompt, by its parent, and the children that fork from it."""

    parent: Generation
    expected: int  # announced children that have not arrived yet
    waiting: list[Generation] = field(default_factory=list)  # until the prompt is computed
    retained_until: float | None = None  # set when the parent has ended; seconds


class ParallelSampling:
    """Forks children from their parents and passes them to the scheduler.

    Used by the step loop's thread only. A child starts like any other generation if its parent is
    unknown, has another prompt or was preempted, or if there is no room for a fork now.
    """

    def __init__(
        self, cache: SequenceCache, scheduler: Scheduler, clock: Callable[[], float]
    ) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._clock = clock
        self._shared: dict[str, _SharedPrompt] = {}  # by the parent's request id

    @property
    def waiting(self) -> int:
        """The number of children that wait for their parent's prompt. Safe on any thread."""
        return sum(len(shared.waiting) for shared in list(self._shared.values()))

    @property
    def retaining(self) -> bool:
        """Whether sequences are retained, so that `sweep` has to be called."""
        return any(shared.retained_until is not None for shared in self._shared.values())

    def add(self, job: Generation) -> None:
        """Add a new generation: a parent, a child or neither."""
        if job.forks and job.request_id not in self._shared:
            self._shared[job.request_id] = _SharedPrompt(job, job.forks)
        shared = None if job.fork_of is None else self._shared.get(job.fork_of)
        if shared is None or shared.parent is job:
            self._scheduler.add(job)
            return
        shared.expected -= 1
        if shared.retained_until is None and shared.parent.generated == 0:
            shared.waiting.append(job)
            return
        self._start(shared.parent, job)
        if shared.retained_until is not None and shared.expected <= 0:
            self._remove(shared)

    def prompt_computed(self, parent: Generation) -> None:
        """Fork the waiting children: `parent` is about to get its first token from this engine."""
        shared = self._shared.get(parent.request_id)
        if shared is not None and shared.parent is parent:
            waiting, shared.waiting = shared.waiting, []
            for child in waiting:
                self._start(parent, child)

    def retain(self, parent: Generation) -> bool:
        """Retain the sequence of an ending parent if children are still expected.

        Returns whether it was retained; `sweep` removes it then, not the caller.
        """
        shared = self._shared.get(parent.request_id)
        if shared is None or shared.parent is not parent or shared.expected <= 0:
            return False
        if self._cache.length(parent.seq_id) < parent.prompt_len:
            return False
        shared.retained_until = self._clock() + RETAIN_S
        return True

    def forget(self, job: Generation) -> None:
        """Drop an ended or failed generation. Its waiting children start without it."""
        if job.fork_of is not None and (shared := self._shared.get(job.fork_of)) is not None:
            shared.waiting = [child for child in shared.waiting if child is not job]
        own = self._shared.get(job.request_id)
        if own is not None and own.parent is job and own.retained_until is None:
            del self._shared[job.request_id]
            for child in own.waiting:
                self._scheduler.add(child)

    def sweep(self) -> None:
        """Remove the sequences that were retained long enough."""
        now = self._clock()
        for shared in list(self._shared.values()):
            if shared.retained_until is not None and shared.retained_until < now:
                self._remove(shared)

    def _start(self, parent: Generation, child: Generation) -> None:
        """Fork `child` from `parent` if possible, and pass it to the scheduler."""
        length = min(parent.prompt_len, child.target - 1)  # the last token has to be computed
        same_prompt = child.tokens[:length] == parent.tokens[:length]
        # A parent with a retained sequence is no longer `started`, but the sequence exists.
        present = parent.started or self._shared[parent.request_id].retained_until is not None
        if not child.started and same_prompt and present and not self._scheduler.full:
            self._fork(parent, child, length)
        self._scheduler.add(child)

    def _fork(self, parent: Generation, child: Generation, length: int) -> None:
        cache = self._cache
        if cache.length(parent.seq_id) < length:
            return  # the parent was preempted and computes its prompt again
        try:
            cache.fork_sequence(parent.seq_id, child.seq_id, length)
        except (NoCapacity, Unsupported):  # without room, or with blocks elsewhere
            return
        try:
            cache.grow(child.seq_id, child.target)
        except NoCapacity:
            cache.remove_sequence(child.seq_id)
            return
        child.begin = child.cached = length
        child.started = True

    def _remove(self, shared: _SharedPrompt) -> None:
        del self._shared[shared.parent.request_id]
        self._cache.remove_sequence(shared.parent.seq_id)

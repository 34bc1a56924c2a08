"""Prompts with a common prefix that arrive together: one job computes it for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.scheduling.jobs import Generation, Job
from kvcache.sequences import SequenceCache

__all__ = ["SharedPrefixes"]


class SharedPrefixes:
    """Finds who computes a common prefix, and lets the others start from it.

    Used by the step loop's thread only.
    """

    def __init__(self, cache: SequenceCache, missing: Callable[[Job], int]) -> None:
        """`missing` returns the tokens that a job has to compute."""
        self._cache = cache
        self._missing = missing
        self.untouched: set[Generation] = set()  # started, without any computed token

    def leader(self, job: Job, jobs: Sequence[Job], waited: set[Generation]) -> tuple[Job, int]:
        """Return the job that computes what `job` needs next, and how many tokens of it.

        Prompts that arrive together often share a prefix. One job, the leader, computes it for all;
        jobs without any computed token wait for it and then start from the computed prefix. Those
        in `waited` have waited for the latest step. A job that shares nothing leads itself.
        """
        if job not in self.untouched or not isinstance(job, Generation):
            return job, self._missing(job)
        if job in waited:
            self._catch_up(job)
        length, earlier = self._cache.length(job.seq_id), True
        for other in jobs:
            if other is job:
                earlier = False
            elif other.started and (earlier or other not in self.untouched):
                common = self._common(job, other)
                if common > max(length, self._cache.length(other.seq_id)):
                    return other, common - self._cache.planned_length(other.seq_id)
        return job, self._missing(job)

    def _common(self, job: Job, other: Job) -> int:
        """Return the tokens in full pages that both share, without the last token of `job`."""
        page = self._cache.page_size
        limit = min(len(job.tokens) - 1, len(other.tokens)) // page * page
        for begin in range(0, limit, page):
            if job.tokens[begin : begin + page] != other.tokens[begin : begin + page]:
                return begin
        return limit

    def _catch_up(self, job: Generation) -> None:
        """Restart from what other jobs have computed of its prompt since it started."""
        cache = self._cache
        with cache.lock:
            cache.remove_sequence(job.seq_id)
            job.begin = job.cached = cache.add_sequence(job.seq_id, job.tokens[:-1])
            # Cannot fail: at least as many pages were just freed.
            cache.grow(job.seq_id, job.target)

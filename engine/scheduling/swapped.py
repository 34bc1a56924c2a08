"""Preempted generations whose sequences are in a tier, or on the way out or back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from engine.scheduling.jobs import Generation
from kvcache.errors import NoCapacity
from kvcache.sequences import SequenceCache

__all__ = ["SwappedGenerations"]


class SwappedGenerations:
    """Moves preempted generations out to a tier and back.

        swap_out ──► moving out ──► out ── swap_in ──► moving in ──► returned

    Used by the step loop's thread only.
    """

    def __init__(self, cache: SequenceCache, wake: Callable[[], object]) -> None:
        """`wake` is called on any thread when a move has ended."""
        self._cache = cache
        self._wake = wake
        self._out: dict[Generation, Future[int]] = {}  # out, or moving out
        self._moving_in: dict[Generation, Future[int]] = {}

    def __contains__(self, job: Generation) -> bool:
        return job in self._out or job in self._moving_in

    @property
    def moving(self) -> bool:
        """Whether pages move in either direction: room, or a job to preempt, follows soon."""
        return bool(self._moving_in) or not all(moved.done() for moved in self._out.values())

    def swap_out(self, job: Generation) -> bool:
        """Move a generation's pages to a tier; return False if no tier has room."""
        try:
            moved = self._cache.swap_out(job.seq_id)
        except NoCapacity:
            return False
        self._out[job] = moved
        moved.add_done_callback(lambda _: self._wake())
        return True

    def swap_in(self, job: Generation) -> bool:
        """Bring a generation back. Has no effect while it moves.

        Return False if there is no room for it. A generation whose pages were lost in the tier
        returns with those that are left.
        """
        if job not in self._out or not self._out[job].done():
            return True
        try:
            moved = self._cache.swap_in(job.seq_id, job.target)
        except NoCapacity:
            return False
        del self._out[job]
        self._moving_in[job] = moved
        moved.add_done_callback(lambda _: self._wake())
        return True

    def returned(self) -> list[Generation]:
        """Drop the generations whose sequences exist again, and return them."""
        if not self._moving_in:
            return []
        returned = [job for job, moved in self._moving_in.items() if moved.done()]
        for job in returned:
            del self._moving_in[job]
        return returned

    def remove(self, job: Generation) -> None:
        """Remove a generation and its sequence. Has no effect on one that was not swapped out."""
        if self._out.pop(job, None) or self._moving_in.pop(job, None):
            self._cache.remove_sequence(job.seq_id)

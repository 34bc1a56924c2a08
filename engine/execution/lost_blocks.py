"""Blocks elsewhere that are lost: their tokens are computed again, and no job fails. No torch."""

from __future__ import annotations

import logging

from engine.execution.runner import StepCache
from engine.execution.step_output import StepStats

__all__ = ["LostBlocks"]

log = logging.getLogger(__name__)


class LostBlocks:
    """Ends blocks whose loans are over, that cannot come home, or found lost by a step.

    A sequence keeps its other blocks: the gap is computed again, from its own tokens, and nothing
    is sampled before that. So no token is drawn twice. Used by the step loop's thread only.
    """

    def __init__(self, cache: StepCache, stats: StepStats) -> None:
        self._cache = cache
        self._stats = stats
        self._refusals = 0  # steps in a row that failed at a creditor
        self._failed_at = -1  # the step that failed last

    def take(self) -> None:
        """End the blocks whose loans have ended or were called back since the last call."""
        if self._cache.elsewhere is not None:
            self._count(*self._cache.elsewhere.take_losses())
            self._stats.moved_blocks = self._cache.elsewhere.moved
            self._stats.home_blocks = dict(self._cache.elsewhere.home)

    def recover(self, error: Exception) -> bool:
        """End the blocks that a failed step has found lost; return whether that is why it failed.

        The jobs of the step go on then: it has no result, and nothing of it is left.
        """
        if self._cache.elsewhere is None:
            return False
        again = self._stats.steps == self._failed_at + 1
        refusals = self._refusals + 1 if again else 1
        lost = self._cache.elsewhere.recover(error, refusals=refusals)
        if lost is None:
            return False
        log.warning("%s; %d blocks are lost", error, lost.blocks)
        self._refusals, self._failed_at = refusals, self._stats.steps
        self._stats.recovered_steps += 1
        self._count(*lost)
        return True

    def _count(self, blocks: int, tokens: int) -> None:
        self._stats.lost_blocks += blocks
        self._stats.recomputed_tokens += tokens

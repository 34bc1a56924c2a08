"""What a step of an engine of workers has room for: sequences take turns where not all fit.

- Rows of logits, for the sequences whose next token it samples. Generations start from leases also
  beyond `max_batch`.
- Pages, where workers have memory of their own (`--device-pages`): a step is computed in half of
  it, while the pages of the next one come into the other half (DéjàVu's microbatches, §4.2.2).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from engine.scheduling.chunk import Chunk
from engine.scheduling.jobs import Generation, Job
from kvcache.sequences import SequenceCache

__all__ = ["StepLimits"]

Decodes = list[tuple[Generation, Chunk]]


class StepLimits:
    """Chooses the decodes and chunks of a step.

    A page that several sequences share counts for each of them.

    Decodes that have waited longest come first. If a prompt found no room beside the decodes,
    prompts come first in the next step, those that found none before the others. So a sequence that
    fits alone always progresses, and so do the decodes.
    """

    def __init__(self, cache: SequenceCache, *, samples: int, pages: int = 0) -> None:
        """A step samples for `samples` sequences, or one more where these are decodes.

        The sequences of a step have at most `pages` pages together; 0: no limit.
        """
        self._cache = cache
        self._samples = samples
        self._most = pages or sys.maxsize
        self._latest: dict[Job, int] = {}  # the latest step in which each decoded
        self._steps = 0
        self._left_out: list[Job] = []  # prompts that found no room in the latest step
        self._prompts_first = False

    def fit(
        self, decodes: Decodes, most: int, counts: dict[Job, int]
    ) -> tuple[Decodes, dict[Job, int]]:
        """Return at most `most` of the decodes, and the prompts with their token counts."""
        self._steps += 1
        most, room = min(most, self._samples), self._most
        first = {job: counts[job] for job in self._left_out if job in counts}
        counts = first | counts
        if self._prompts_first:
            prompts, room = self._prompts(counts, room)
            decodes, _ = self._decodes(decodes, most, room)
        else:
            decodes, room = self._decodes(decodes, most, room)
            prompts, _ = self._prompts(counts, room)
        # Each chunk may be the last one of its prompt, and sampled for.
        chosen = dict(list(prompts.items())[: max(self._samples - len(decodes), 1)])
        self._left_out = [job for job in counts if job not in chosen]
        self._prompts_first = bool(self._left_out) and not self._prompts_first
        return decodes, chosen

    def forget(self, job: Job) -> None:
        """Forget a job that has ended."""
        self._latest.pop(job, None)

    def _decodes(
        self, decodes: Sequence[tuple[Generation, Chunk]], most: int, room: int
    ) -> tuple[Decodes, int]:
        chosen: Decodes = []
        for job, chunk in sorted(decodes, key=lambda each: self._latest.get(each[0], 0)):
            pages = self._pages(self._cache.planned_length(job.seq_id) + 1)
            if pages > room or len(chosen) == most:
                break
            room -= pages
            self._latest[job] = self._steps
            chosen.append((job, chunk))
        return chosen, room

    def _prompts(self, counts: dict[Job, int], room: int) -> tuple[dict[Job, int], int]:
        chosen: dict[Job, int] = {}
        for job, count in counts.items():
            if not job.started:
                continue
            length = self._cache.planned_length(job.seq_id)
            fitting = min(count, room * self._cache.page_size - length)
            if fitting > 0:
                chosen[job] = fitting
                room -= self._pages(length + fitting)
        return chosen, room

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._cache.page_size)

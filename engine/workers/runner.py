"""Has the workers compute a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import cycle
from typing import NamedTuple

import torch

from engine.execution.forward.step_rows import step_rows
from engine.protocol import Internal
from engine.scheduling import Chunk
from engine.workers.exchange import Kind, StepMessage
from engine.workers.store import WorkerStore
from kvcache.cache import KVCache

__all__ = ["WorkersRunner"]


class _Started(NamedTuple):
    """A step that the workers have been told of, or why they have not."""

    number: int = 0  # of the message
    begin: int = 0  # first row of its logits
    rows: int = 0
    failure: Exception | None = None


class WorkersRunner:
    """A `Runner` that sends steps to the workers, and returns the logits they wrote.

    The workers of a stage go on with the next step while a later stage computes this one. Steps
    that a worker did not end before it died are computed again by all.
    """

    def __init__(self, store: WorkerStore, cache: KVCache, *, depth: int) -> None:
        """`store` is that of `cache`. At most `depth` steps are under way at a time."""
        self._group = group = store.group
        self._cache = cache
        self._started: deque[_Started] = deque()
        self._places = cycle(range(depth))
        self._rows = len(group.logits) // depth
        self.row_multiple = group.row_multiple

    def start(self, chunks: Sequence[Chunk]) -> None:
        """Have the workers compute a step. If that fails, `run` raises why."""
        cache = self._cache
        step = cache.begin_forward(
            [chunk.seq_id for chunk in chunks], [len(chunk.tokens) for chunk in chunks]
        )
        try:
            rows = step_rows(chunks, step, self.row_multiple)
            if len(rows.wanted) > self._rows:
                raise Internal(f"{rows.logits} rows of logits, where {self._rows} fit")
            begin = next(self._places) * self._rows
            number = self._group.tell(
                Kind.STEP, StepMessage.arrays_of(begin, rows, step, cache.page_size)
            )
        except Exception as failure:  # noqa: BLE001  `run` raises it
            self._started.append(_Started(failure=failure))
        else:
            self._started.append(_Started(number, begin, rows.logits))

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Wait for the step that was started first; return its logits.

        They are `[chunks with sample, vocab]` float32, and valid until `depth` further steps have
        been started. Raises `Internal` if a worker is lost.
        """
        started = self._started.popleft()
        try:
            if started.failure is not None:
                raise started.failure
            self._group.wait(started.number)
        except BaseException:
            self._cache.abort_forward()
            raise
        self._cache.end_forward()
        return self._group.logits[started.begin : started.begin + started.rows]

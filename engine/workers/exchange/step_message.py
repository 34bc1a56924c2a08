"""A step as the lead tells its workers: plain arrays, once for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.execution.forward.step_rows import StepRows
from engine.workers.exchange.wire import Array
from kvcache.sequences import Span, StepDescription
from kvcache.types import TokenPos

__all__ = ["StepMessage"]


class StepMessage(NamedTuple):
    """A step, as workers compute it."""

    begin: int  # first row of its logits in the shared memory
    tokens: Array  # [rows], with padding
    positions: Array  # [rows]
    wanted: Array  # rows whose logits are wanted, with padding
    step: StepDescription  # spans only

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> StepMessage:
        """Return the message that `arrays_of` has made these arrays of."""
        begin, tokens, positions, wanted, spans, lengths, tables = arrays
        pages = np.split(tables.astype(np.int32), np.cumsum(lengths)[:-1])
        described = tuple(
            Span(int(row), TokenPos(int(start)), int(count), own)
            for (row, start, count), own in zip(spans.reshape(-1, 3), pages, strict=True)
        )
        return cls(int(begin[0]), tokens, positions, wanted, StepDescription((), described))

    @staticmethod
    def arrays_of(
        begin: int, rows: StepRows, step: StepDescription, page_size: int
    ) -> list[Array | Sequence[int]]:
        """Return the arrays of a message."""
        spans = step.spans
        tables = [span.pages[: -(-(span.start + span.count) // page_size)] for span in spans]
        return [
            [begin],
            rows.tokens,
            rows.positions,
            rows.wanted,
            np.array([(s.row, s.start, s.count) for s in spans], dtype=np.int64),
            np.array([len(table) for table in tables], dtype=np.int64),
            np.concatenate(tables).astype(np.int64),
        ]

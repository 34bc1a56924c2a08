"""A latency model that follows measured steps point by point, where no formula fits them."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from engine.latency.rows import padded_rows
from engine.latency.step import STRICT, Amount, StepWork

__all__ = ["Points", "TableLatency", "interpolate"]

Points = tuple[tuple[Annotated[int, Field(ge=1)], Amount], ...]  # a count, and its milliseconds


def _rising(points: Points) -> Points:
    """Check that counts rise and times do not fall."""
    for (before, shorter), (after, longer) in pairwise(points):
        if after <= before or longer < shorter:
            raise PydanticCustomError(
                "falling_table",
                "from {before} to {after}, a table's counts rise and its times do not fall",
                {"before": before, "after": after},
            )
    return points


Rising = Annotated[Points, Field(min_length=1), AfterValidator(_rising)]


@dataclass(frozen=True, slots=True, config=STRICT)
class TableLatency:
    """Interpolates linearly between measured points, with times in milliseconds.

    With T prompt tokens in the step and B decodes with L tokens before each, the sum of:

    - `rows(T + B)`: what depends on the number of tokens; up to T it is measured on whole prompts,
      with the attention among their own tokens. The engine pads them as `row_multiple` has it (see
      `padded_rows`)
    - `square_ms · max(0, Σ squares - T²)`: attention to what stands before the chunks
    - `sequences(B) + context_ms · ΣL`: what decodes cost beyond that
    - `mixed_ms · ΣL` if there are prompts too: kernels for both are slower at decodes

    Before its first point a table is constant. After its last one it goes on as between the last
    two.
    """

    rows: Rising
    sequences: Rising
    square_ms: Amount = 0.0
    context_ms: Amount = 0.0
    mixed_ms: Amount = 0.0
    row_multiple: Annotated[int, Field(ge=0)] = 0
    kind: Literal["table"] = "table"

    def seconds(self, work: StepWork) -> float:
        """Return the duration of a step in seconds; 0 for a step that computes nothing."""
        tokens = work.prompt_tokens + work.decodes
        if not tokens:
            return 0.0
        ms = interpolate(self.rows, padded_rows(tokens, self.row_multiple))
        if work.prompt_tokens:
            ms += self.square_ms * max(work.prompt_squares - work.prompt_tokens**2, 0)
            ms += self.mixed_ms * work.context
        if work.decodes:
            ms += interpolate(self.sequences, work.decodes) + self.context_ms * work.context
        return ms / 1e3


def interpolate(points: Points, count: int) -> float:
    """Return the milliseconds for a count, between the two points around it."""
    if count <= points[0][0] or len(points) == 1:
        return points[0][1]
    # The end of the segment that `count` is in, or of the last one.
    index = min(bisect_left(points, (count,)), len(points) - 1)
    (left, low), (right, high) = points[index - 1], points[index]
    return low + (high - low) * (count - left) / (right - left)

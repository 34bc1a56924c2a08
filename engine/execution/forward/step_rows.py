"""The rows of a step as lists: tokens, positions, and which logits are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.latency import padded_rows
from engine.scheduling import Chunk
from kvcache.sequences import StepDescription

__all__ = ["StepRows", "step_rows"]


class StepRows(NamedTuple):
    """The rows of a step: one for each token of its chunks, and then padding."""

    tokens: list[int]
    positions: list[int]
    wanted: list[int]  # rows whose logits are wanted, and then padding
    logits: int  # how many of them are no padding


def step_rows(chunks: Sequence[Chunk], step: StepDescription, multiple: int) -> StepRows:
    """Return the rows of a step of these chunks, padded as `row_multiple` has it."""
    tokens: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    for chunk, span in zip(chunks, step.spans, strict=True):
        tokens += chunk.tokens
        positions += range(span.start, span.start + span.count)
        if chunk.sample:
            wanted.append(len(tokens) - 1)
    logits = len(wanted)
    padding = [0] * (padded_rows(len(tokens), multiple) - len(tokens))
    wanted += [0] * (padded_rows(logits, multiple) - logits)
    return StepRows(tokens + padding, positions + padding, wanted, logits)

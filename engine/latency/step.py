"""How long a step takes, given what it computes."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, Protocol

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from engine.latency.rows import padded_rows

__all__ = [
    "STRICT",
    "Amount",
    "Coefficients",
    "FittedLatency",
    "FixedLatency",
    "StepLatency",
    "StepWork",
]

STRICT = ConfigDict(strict=True, extra="forbid")  # of all parts of a profile
# Negative coefficients would make more tokens take less time.
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Coefficients = tuple[Amount, Amount, Amount]


class StepWork(NamedTuple):
    """What one step computes."""

    prompt_tokens: int = 0  # of all chunks of prompts and sends
    prompt_squares: int = 0  # sum over these chunks of (start + count)**2 - start**2
    decodes: int = 0  # sequences that decode one token each
    context: int = 0  # tokens before these, summed over the sequences


class StepLatency(Protocol):
    """A model of an engine's steps."""

    def seconds(self, work: StepWork) -> float:
        """Return the duration of a step in seconds; 0 for a step that computes nothing."""
        ...


@dataclass(frozen=True, slots=True, config=STRICT)
class FittedLatency:
    """DistServe's model (Zhong et al. 2024, appendix A), with coefficients in milliseconds.

    With l the length of a chunk that starts at its prompt's begin, L the context of a decode, and
    B the number of decodes:

    - prompts: `(a + b·Σl + c·Σl²) / pp + stage_ms·pp`
    - decodes: `(a + b·ΣL + c·B) / pp`, with `large_decode` from `large_batch` decodes on

    A chunk that starts later counts the difference of the squares of its end and its start, so the
    chunks of a prompt together pay for its attention as much as the whole prompt at once.
    A step with prompts and decodes pays the larger `a` once, and all other terms of both.

    `row_multiple`, as of `padded_rows`, is how the engine pads the rows of a step. Padding costs as
    much as tokens of prompts, and in a step without prompts as much as decodes.

    One decode alone takes `single_ms`, and `b` for its context, where that is given: processors may
    multiply one row in another way than several.

    With `pp` > 1 this is the time that one of `pp` pipeline stages takes. A batch passes all of
    them, and `pp` batches are under way at a time.
    """

    prefill: Coefficients
    decode: Coefficients
    large_decode: Coefficients
    large_batch: Annotated[int, Field(ge=1)] = 95
    pp: Annotated[int, Field(ge=1)] = 1
    stage_ms: Amount = 0.0
    row_multiple: Annotated[int, Field(ge=0)] = 0
    single_ms: Amount = 0.0
    kind: Literal["fitted"] = "fitted"

    def seconds(self, work: StepWork) -> float:
        """Return the duration of a step in seconds; 0 for a step that computes nothing."""
        constant = varying = passing = 0.0
        if self.single_ms and work.decodes == 1 and not work.prompt_tokens:
            return (self.single_ms + self.decode[1] * work.context) / self.pp / 1e3
        if work.prompt_tokens:
            constant, token, square = self.prefill
            varying = (
                token * (work.prompt_tokens + self._padding(work)) + square * work.prompt_squares
            )
            passing = self.stage_ms * self.pp
        if work.decodes:
            large = work.decodes >= self.large_batch
            own, token, sequence = self.large_decode if large else self.decode
            constant = max(constant, own)
            rows = work.decodes if work.prompt_tokens else work.decodes + self._padding(work)
            varying += token * work.context + sequence * rows
        return ((constant + varying) / self.pp + passing) / 1e3

    def _padding(self, work: StepWork) -> int:
        if not self.row_multiple:
            return 0
        rows = work.prompt_tokens + work.decodes
        return padded_rows(rows, self.row_multiple) - rows


@dataclass(frozen=True, slots=True, config=STRICT)
class FixedLatency:
    """The pace of the model `mock`: a fixed time, and more for each prompt token.

    A step takes `step_ms`, and `1 / prompt_tokens_per_ms` more for each prompt token (0: nothing).
    """

    step_ms: Amount
    prompt_tokens_per_ms: Amount = 0.0
    kind: Literal["fixed"] = "fixed"

    def seconds(self, work: StepWork) -> float:
        """Return the duration of a step in seconds; 0 for a step that computes nothing."""
        if not (work.prompt_tokens or work.decodes):
            return 0.0
        ms = self.step_ms
        if self.prompt_tokens_per_ms:
            ms += work.prompt_tokens / self.prompt_tokens_per_ms
        return ms / 1e3

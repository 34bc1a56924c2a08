"""The results and the counters of steps. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from engine.protocol import MicroserveError
from engine.scheduling import Chunk, Generation, Job

if TYPE_CHECKING:
    from engine.sampling.sampled import Sampled

__all__ = ["PlannedStep", "StepOutput", "StepResult", "StepStats"]


class StepOutput(NamedTuple):
    """The output of one step for one generation: a token, possibly with an end, or a failure."""

    generation: Generation
    sampled: Sampled | None = None
    finish: Literal["stop", "length"] | None = None
    failure: MicroserveError | None = None


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The jobs of a step with their chunks, and when it was planned."""

    plan: Sequence[tuple[Job, Chunk]]
    began: float  # by the stepper's clock, in seconds
    counts: tuple[int, int] = (0, 0)  # decodes, and tokens of prompts


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one call of `Stepper.step` did."""

    chunks: int  # computed by this step, or failed with it; 0: there was nothing to compute
    outputs: Sequence[StepOutput]  # as delivered
    # When to call `step` again, in seconds by the stepper's clock. None: only after `wake`.
    next_at: float | None


@dataclass(slots=True)
class StepStats:
    """Counters since the start."""

    steps: int = 0
    step_s: float = 0.0
    model_s: float = 0.0
    prompt_tokens: int = 0  # computed for prompts and sends
    generation_tokens: int = 0  # sampled
    expired_leases: int = 0
    failed_steps: int = 0
    recovered_steps: int = 0  # failed at a creditor, and were computed again
    moved_blocks: int = 0  # that have arrived at creditors
    home_blocks: dict[str, int] = field(default_factory=dict)  # come home, by cause
    lost_blocks: int = 0  # at creditors, whose loans ended, or that could not come home in time
    recomputed_tokens: int = 0  # of these blocks

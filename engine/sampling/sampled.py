"""The result of sampling for one sequence. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol import MicroserveError

__all__ = ["Sampled"]


@dataclass(slots=True)
class Sampled:
    """One sampled token and, on request, its log probability and the likeliest alternatives."""

    token: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()  # (token, logprob), descending
    failure: MicroserveError | None = None  # no token could be sampled
    earlier: Sequence[int] = ()  # tokens of the steps before, where several were computed at once

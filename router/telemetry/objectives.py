"""Service level objectives, and percentiles that are held against them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Slo", "percentile"]


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives that a request must meet to count for goodput, in ms; `None`: any value."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def scaled(self, factor: float) -> Slo:
        """Return the objectives times a factor: DistServe's SLO scale, below 1 is stricter."""
        return Slo(
            None if self.ttft_ms is None else self.ttft_ms * factor,
            None if self.tpot_ms is None else self.tpot_ms * factor,
        )

    def meets_ttft(self, seconds: float | None) -> bool:
        """Return whether a time to first token is within the objective; `None` is."""
        return _meets(seconds, self.ttft_ms)

    def meets_tpot(self, seconds: float | None) -> bool:
        """Return whether a time per output token is within the objective; `None` is."""
        return _meets(seconds, self.tpot_ms)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return a percentile by nearest rank, so one of the values; `None` if there are none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def _meets(seconds: float | None, limit_ms: float | None) -> bool:
    return limit_ms is None or seconds is None or seconds * 1e3 <= limit_ms

"""How fast a creditor answers, from the answers so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["Estimate", "RunningEstimate"]

KEPT: Final = 0.98  # of the weight of earlier samples, with each new one


@dataclass(frozen=True, slots=True)
class Estimate:
    """What an answer of a creditor takes. Zeros where nothing has been measured."""

    latency_s: float  # of an exchange of no bytes
    s_per_byte: float  # that travels in either direction; 0: the samples do not tell it
    s_per_row_key: float  # of the creditor's computation, for one row and one key, in one layer
    waited_s: float  # for the creditor's turn, on average
    samples: int

    def answer_s(self, travelling: int, row_keys: int) -> float:
        """Return the expected time from a query to its answer, in one layer.

        `travelling` counts the bytes of queries and parts (`ship_or_pull.shipped_bytes`),
        `row_keys` the rows times the keys that the creditor holds of them.
        """
        transfer = self.latency_s + travelling * self.s_per_byte
        return transfer + self.waited_s + row_keys * self.s_per_row_key


class RunningEstimate:
    """Fits `transfer = latency + bytes · s_per_byte` by least squares; old samples fade."""

    def __init__(self) -> None:
        self._samples = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._row_keys = self._computed_s = self._answers = self._waited_s = 0.0

    def add_transfer(self, travelling: int, seconds: float) -> None:
        """Count an exchange of so many bytes, without the creditor's computation and waiting."""
        x, y = float(travelling), max(seconds, 0.0)
        self._samples += 1
        self._weight = KEPT * self._weight + 1
        self._x = KEPT * self._x + x
        self._y = KEPT * self._y + y
        self._xx = KEPT * self._xx + x * x
        self._xy = KEPT * self._xy + x * y

    def add_computation(self, row_keys: int, seconds: float, waited_s: float) -> None:
        """Count a computation of the creditor, as it says."""
        self._row_keys = KEPT * self._row_keys + row_keys
        self._computed_s = KEPT * self._computed_s + seconds
        self._answers = KEPT * self._answers + 1
        self._waited_s = KEPT * self._waited_s + waited_s

    def now(self) -> Estimate:
        """Return the estimate."""
        weight = max(self._weight, 1e-9)
        mean_x, mean_y = self._x / weight, self._y / weight
        variance = self._xx / weight - mean_x * mean_x
        slope = 0.0
        if variance > (0.1 * mean_x) ** 2:  # else the sizes do not differ enough to tell
            slope = max(0.0, (self._xy / weight - mean_x * mean_y) / variance)
        return Estimate(
            latency_s=max(0.0, mean_y - slope * mean_x),
            s_per_byte=slope,
            s_per_row_key=self._computed_s / max(self._row_keys, 1e-9),
            waited_s=self._waited_s / max(self._answers, 1e-9),
            samples=self._samples,
        )

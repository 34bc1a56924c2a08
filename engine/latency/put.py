"""How long a put takes on a link without other traffic."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from engine.latency.step import STRICT, Amount

__all__ = ["PutLatency"]


@dataclass(frozen=True, slots=True, config=STRICT)
class PutLatency:
    """An engine's link to its peers. A put of n bytes of one layer takes `layer_s + n/bandwidth`.

    This is the shape of the microserving paper's Table 3.
    """

    bandwidth: Annotated[float, Field(gt=0, allow_inf_nan=False)]  # bytes/s, in each direction
    layer_s: Amount = 0.0  # seconds for each layer of a put, beside its bytes

    def seconds(self, count: int, layers: int = 1) -> float:
        """Return the seconds for `count` bytes in `layers` layers, without other traffic."""
        return layers * self.layer_s + count / self.bandwidth

"""Profiles of running engines: what `microserve profile` measures.

Imports `engines`, `supervisor` and below, and of the engine `protocol` and `latency`.
"""

from router.profiling.children import two_engines
from router.profiling.measure import Measurement, measure

__all__ = ["Measurement", "measure", "two_engines"]

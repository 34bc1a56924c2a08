"""Time lines of engines and requests, as files for Perfetto and chrome://tracing.

Imports `engines`, `telemetry` and `base`.
"""

from router.timeline.chrome_trace import ChromeTrace, Slice
from router.timeline.engine_work import ask_engines
from router.timeline.fleet_trace import EngineWork, TracedPut, TracedStep, fleet_trace
from router.timeline.requests import TracedLeg, TracedRequest, traced, traced_legs

__all__ = [
    "ChromeTrace",
    "EngineWork",
    "Slice",
    "TracedLeg",
    "TracedPut",
    "TracedRequest",
    "TracedStep",
    "ask_engines",
    "fleet_trace",
    "traced",
    "traced_legs",
]

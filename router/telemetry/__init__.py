"""What is known about requests: receipts, metrics, logs, traces and events. Imports `base`."""

from router.telemetry.events import Events
from router.telemetry.logs import serves, set_up_logging
from router.telemetry.metrics import Metrics
from router.telemetry.objectives import Slo, percentile
from router.telemetry.receipts import Call, Leg, Receipt, Receipts
from router.telemetry.trace import Trace, Tracing

__all__ = [
    "Call",
    "Events",
    "Leg",
    "Metrics",
    "Receipt",
    "Receipts",
    "Slo",
    "Trace",
    "Tracing",
    "percentile",
    "serves",
    "set_up_logging",
]

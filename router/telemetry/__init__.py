"""What is known about requests: receipts, metrics, logs, traces and events. Imports `base`."""

from router.telemetry.activity import WINDOW_S, Activity, Sample
from router.telemetry.events import Events, Listener
from router.telemetry.logs import serves, set_up_logging
from router.telemetry.merged import Samples, counters, merged, render
from router.telemetry.metrics import Metrics
from router.telemetry.objectives import Slo, percentile
from router.telemetry.receipts import CANCELLED, Call, Leg, Receipt, Receipts
from router.telemetry.trace import Trace, Tracing
from router.telemetry.traffic import RecordedRequest, Traffic, recording

__all__ = [
    "CANCELLED",
    "WINDOW_S",
    "Activity",
    "Call",
    "Events",
    "Leg",
    "Listener",
    "Metrics",
    "Receipt",
    "Receipts",
    "RecordedRequest",
    "Sample",
    "Samples",
    "Slo",
    "Trace",
    "Tracing",
    "Traffic",
    "counters",
    "merged",
    "percentile",
    "recording",
    "render",
    "serves",
    "set_up_logging",
]

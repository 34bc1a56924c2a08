"""The trace that a request belongs to: W3C's `traceparent`, in and out."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Protocol

from router.telemetry.receipts import Receipt

__all__ = ["Trace", "Tracing", "Untraced", "open_tracing"]

_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}.*"
)


class Trace(Protocol):
    """One request's part of a trace."""

    headers: Mapping[str, str]  # sent on every leg, and back to the client

    def finish(self, receipt: Receipt) -> None:
        """Export the spans of the request, which has ended, and of its legs."""


class Tracing(Protocol):
    """One router's tracing."""

    def begin(self, headers: Mapping[str, str]) -> Trace:
        """Begin the trace of a request with these headers."""

    def close(self) -> None:
        """Send the remaining spans. Blocks for at most a few seconds."""


class _Passed:
    """A trace that is passed on but not recorded."""

    __slots__ = ("headers",)

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = headers

    def finish(self, receipt: Receipt) -> None:
        pass


class Untraced:
    """Passes on the client's trace, or begins one.

    The trace id then finds one request in the logs of all engines.
    """

    def begin(self, headers: Mapping[str, str]) -> Trace:
        parent = headers.get("traceparent")
        if parent is None or not _TRACEPARENT.fullmatch(parent):
            # The last bit says whether the trace is recorded.
            made = f"{random.getrandbits(192):048x}"
            return _Passed({"traceparent": f"00-{made[:32]}-{made[32:]}-00"})
        state = headers.get("tracestate")
        return _Passed({"traceparent": parent, **({"tracestate": state} if state else {})})

    def close(self) -> None:
        pass


def open_tracing(environment: Mapping[str, str]) -> Tracing:
    """Return OpenTelemetry tracing if the standard variables ask for it, else `Untraced`.

    They ask for it if an OTLP endpoint is set, without `OTEL_SDK_DISABLED=true` and
    `OTEL_TRACES_EXPORTER=none`. Raises `BadRequest` if the extra `otel` is needed but missing.
    """
    endpoint = any(
        environment.get(f"OTEL_EXPORTER_OTLP_{name}ENDPOINT") for name in ("", "TRACES_")
    )
    exporter = environment.get("OTEL_TRACES_EXPORTER", "otlp" if endpoint else "none")
    if exporter != "otlp" or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return Untraced()
    from router.telemetry.otel import OtelTracing  # slow to import: a second, and megabytes

    return OtelTracing()

"""The trace that a request is part of: W3C's `traceparent`, in and out."""

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
        """The request has ended: its span and those of its legs are told to whoever collects."""


class Tracing(Protocol):
    """Of one router."""

    def begin(self, headers: Mapping[str, str]) -> Trace:
        """A request with such headers begins."""

    def close(self) -> None:
        """Send what is left, within a few seconds. Blocks."""


class _Passed:
    """A trace of which nothing is recorded here."""

    __slots__ = ("headers",)

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = headers

    def finish(self, receipt: Receipt) -> None:
        pass


class Untraced:
    """Passes on the client's trace, and begins one where there is none, so that the engines' logs
    of one request can be found by it."""

    def begin(self, headers: Mapping[str, str]) -> Trace:
        parent = headers.get("traceparent", "")
        if not _TRACEPARENT.fullmatch(parent):
            # The last bit says whether anybody records it.
            made = f"{random.getrandbits(192):048x}"
            return _Passed({"traceparent": f"00-{made[:32]}-{made[32:]}-00"})
        state = headers.get("tracestate")
        return _Passed({"traceparent": parent, **({"tracestate": state} if state else {})})

    def close(self) -> None:
        pass


def open_tracing(environment: Mapping[str, str]) -> Tracing:
    """OpenTelemetry, if the standard variables ask for it: an OTLP endpoint is set, and neither
    `OTEL_SDK_DISABLED=true` nor `OTEL_TRACES_EXPORTER=none`.

    Raises `BadRequest` if they do, and the extra `otel` is not installed.
    """
    endpoint = any(
        environment.get(f"OTEL_EXPORTER_OTLP_{name}ENDPOINT") for name in ("", "TRACES_")
    )
    exporter = environment.get("OTEL_TRACES_EXPORTER", "otlp" if endpoint else "none")
    if exporter != "otlp" or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return Untraced()
    from router.telemetry.otel import OtelTracing  # only now: a second, and megabytes

    return OtelTracing()

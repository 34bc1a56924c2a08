"""What a time line shows of a request: plain data, made of its receipt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from router.telemetry import Leg, Receipt

__all__ = ["TracedLeg", "TracedRequest", "traced", "traced_legs"]

ABOUT_LEG = (
    "choice", "attempt", "begin", "end", "match_len", "bytes", "sent_tokens", "cached_tokens",
    "computed_tokens", "tokens", "first_token_ms", "recomputed_tokens", "replica",
)  # fmt: skip


class TracedLeg(Struct, array_like=True):
    """A call to an engine. Times are seconds, `begin_s` on the clock of the request."""

    call: str
    engine: str
    request_id: str  # on engines
    begin_s: float
    seconds: float
    about: dict[str, Any]


class TracedRequest(Struct, array_like=True):
    """A request. Times are seconds on one clock. `phases` are names, begins and durations."""

    name: str
    begin_s: float
    seconds: float
    phases: list[tuple[str, float, float]]
    legs: list[TracedLeg]
    about: dict[str, Any]


def traced(receipt: Receipt) -> TracedRequest:
    """Return what a receipt says; a request that runs lasts until now."""
    elapsed_ms = receipt.elapsed_ms()
    times = receipt.timings()
    phases, at = [], receipt.began
    for name, ms in times.breakdown().items():
        phases.append((name, at, ms / 1e3))
        at += ms / 1e3
    about: dict[str, Any] = {
        "request": receipt.id, "status": receipt.status, "strategy": receipt.strategy,
        "generation": receipt.generation, "prompt_tokens": receipt.prompt_tokens,
        "cached_tokens": receipt.cached_tokens, "completion_tokens": receipt.completion_tokens,
        "first_token_ms": receipt.first_token_ms, "queued_ms": receipt.queued_ms,
        "waits": receipt.waits, "retries": receipt.retries, "fallbacks": receipt.fallbacks,
        "error": receipt.error,
    }  # fmt: skip
    return TracedRequest(
        receipt.id,
        receipt.began,
        (elapsed_ms if receipt.ms is None else receipt.ms) / 1e3,
        phases,
        traced_legs(receipt.legs, receipt.began, elapsed_ms),
        _present(about),
    )


def traced_legs(legs: Iterable[Leg], began_s: float, elapsed_ms: float) -> list[TracedLeg]:
    """Return the legs of a request that `began_s`; those that run last until `elapsed_ms`."""
    return [
        TracedLeg(
            leg.call,
            leg.engine,
            leg.request_id,
            began_s + leg.start_ms / 1e3,
            (elapsed_ms - leg.start_ms if leg.ms is None else leg.ms) / 1e3,
            _present({**{name: getattr(leg, name) for name in ABOUT_LEG}, "error": leg.error}),
        )
        for leg in legs
    ]


def _present(about: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what says nothing."""
    return {name: value for name, value in about.items() if value not in (None, [], 0, 0.0)}

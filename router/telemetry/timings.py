"""Where the time of a request went, from its receipt: DistServe's lifetime events.

issued ── queue ── prefill_begin ── prefill_end ── migration_begin ── migration_end ── decode_begin
── decode_end. Each is milliseconds since the request arrived; none is before the one that precedes
it, and the phases between them add up to the whole.

They are those of the first choice that had a token. A send puts layer by layer while it computes,
so only what is left to put then is migration: what the disaggregation has cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.telemetry.receipts import Leg, Receipt

__all__ = ["Timings", "lifetime", "server_timing"]


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds since the request arrived (`issued`), never falling."""

    issued: float
    prefill_begin: float
    prefill_end: float
    migration_begin: float
    migration_end: float
    decode_begin: float
    decode_end: float

    def events(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__slots__}

    def breakdown(self) -> dict[str, float]:
        """The time of each phase (ms). Their sum is `decode_end`."""
        return {
            "queue": self.prefill_begin - self.issued,
            "prefill": self.prefill_end - self.prefill_begin,
            "migration": self.migration_end - self.prefill_end,
            "decode": self.decode_end - self.migration_end,
        }


def lifetime(receipt: Receipt) -> Timings:
    """Of a request that has ended, or up to now."""
    total = receipt.ms if receipt.ms is not None else receipt.elapsed_ms()
    begin = min((leg.start_ms for leg in receipt.legs), default=total)
    answers = [leg for leg in receipt.legs if leg.first_token_ms is not None]
    if not answers:
        return _of(begin, total, total, total)
    answer = min(answers, key=_first_token)
    sends = [
        leg
        for leg in receipt.legs
        if leg.call == "remote_send" and leg.request_id == answer.request_id and leg.ms is not None
        if leg.sent_tokens
    ]
    if not sends:
        first = _first_token(answer)
        return _of(begin, first, first, total)
    last = max(sends, key=_end)
    landed = _end(last)
    computed = landed - min(last.put_ms, last.ms or 0.0)
    return _of(begin, computed, landed, total)


def server_timing(receipt: Receipt) -> str:
    """The value of a `Server-Timing` header: what has been so far."""
    it = lifetime(receipt)
    return (
        f"queue;dur={it.prefill_begin:.1f}, prefill;dur={it.prefill_end - it.prefill_begin:.1f}, "
        f"migration;dur={it.migration_end - it.migration_begin:.1f}, "
        f"decode;dur={it.decode_end - it.decode_begin:.1f}, total;dur={it.decode_end:.1f}"
    )


def _first_token(leg: Leg) -> float:
    return leg.start_ms + (leg.first_token_ms or 0.0)


def _end(leg: Leg) -> float:
    return leg.start_ms + (leg.ms or 0.0)


def _of(begin: float, prefilled: float, migrated: float, total: float) -> Timings:
    """Clocks are read one after another: what is a hair before its predecessor is as late."""
    begin = min(max(begin, 0.0), total)
    prefilled = min(max(begin, prefilled), total)
    migrated = min(max(prefilled, migrated), total)
    return Timings(0.0, begin, prefilled, prefilled, migrated, migrated, total)

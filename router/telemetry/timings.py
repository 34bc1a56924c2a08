"""Where the time of a request went: DistServe's lifetime events.

issued ── queue ── prefill_begin ── prefill_end ── migration_begin ── migration_end ── decode_begin
── decode_end. Events are in milliseconds since the request arrived. They never decrease, and the
phases between them add up to the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Timings"]


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds since the request arrived (`issued`), never decreasing."""

    issued: float
    prefill_begin: float
    prefill_end: float
    migration_begin: float
    migration_end: float
    decode_begin: float
    decode_end: float

    @classmethod
    def of(cls, begin: float, prefilled: float, migrated: float, total: float) -> Timings:
        """Return the events of a request with these milestones.

        Clocks are read one after another: an event slightly before its predecessor is moved to it.
        """
        begin = min(max(begin, 0.0), total)
        prefilled = min(max(begin, prefilled), total)
        migrated = min(max(prefilled, migrated), total)
        return cls(0.0, begin, prefilled, prefilled, migrated, migrated, total)

    def events(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__slots__}

    def breakdown(self) -> dict[str, float]:
        """Return the duration of each phase (ms). They sum to `decode_end`."""
        return {
            "queue": self.prefill_begin - self.issued,
            "prefill": self.prefill_end - self.prefill_begin,
            "migration": self.migration_end - self.prefill_end,
            "decode": self.decode_end - self.migration_end,
        }

    def server_timing(self) -> str:
        """Return the value of a `Server-Timing` header."""
        phases = "".join([f"{name};dur={ms:.1f}, " for name, ms in self.breakdown().items()])
        return f"{phases}total;dur={self.decode_end:.1f}"

"""Numbers about one tier: its slots by owner, and counters."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TierStats", "TierUse"]


@dataclass(frozen=True, slots=True)
class TierUse:
    """Slots by owner, adding up to `total`."""

    name: str
    total: int
    free: int
    cached: int
    swapped: int
    copying: int


@dataclass(slots=True)
class TierStats:
    """Counters since the start."""

    promoted_tokens: int = 0
    swaps_out: int = 0
    swaps_in: int = 0
    bytes_in: int = 0  # written to the tier
    bytes_out: int = 0  # copied from the tier to the device
    failures: int = 0  # pages that could not be copied
    skipped: int = 0  # prefixes without write-behind, for lack of time or room

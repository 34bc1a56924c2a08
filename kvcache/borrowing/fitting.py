"""Which sequences fit a step, by what their creditors answer in one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from kvcache.borrowing.answer_limits import AnswerLimits
from kvcache.sequences import AwayBlocks
from kvcache.types import EngineId, LeaseId

__all__ = ["fitting"]


def fitting(rows: Sequence[tuple[AwayBlocks | None, int]], limits: AnswerLimits) -> list[bool]:
    """Return which sequences, each with its blocks that are away and a count of rows, fit a step.

    See `BlocksElsewhere.fitting`.
    """
    used: defaultdict[EngineId, float] = defaultdict(float)
    found = []
    for away, count in rows:
        blocks: dict[EngineId, list[int]] = {}
        loans: dict[EngineId, set[LeaseId]] = {}
        for number, block in away.items if away is not None else ():
            blocks.setdefault(block.creditor, []).append(number)
            loans.setdefault(block.creditor, set()).add(block.loan)
        shares = {
            creditor: limits.share(creditor, numbers, loans[creditor], count)
            for creditor, numbers in blocks.items()
        }
        fits = all(not used[one] or used[one] + share <= 1 for one, share in shares.items())
        found.append(fits)
        for creditor, share in shares.items() if fits else ():
            used[creditor] += share
    return found

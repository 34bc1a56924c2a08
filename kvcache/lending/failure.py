"""How a debtor learns that a creditor did not answer."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.errors import MicroserveError, PeerUnreachable
from kvcache.types import EngineId, LeaseId

__all__ = ["CreditorFailed"]


class CreditorFailed(PeerUnreachable):
    """A creditor has refused a step, or is lost. The step has no result; nothing is left of it.

    If it has refused, `loans` are those that it does not know or that have ended, and none if
    something else is wrong; it can be asked again. If it is lost, `loans` are all of the step, and
    it has to be connected anew.
    """

    def __init__(
        self, creditor: EngineId, loans: Sequence[LeaseId], reason: MicroserveError, *, lost: bool
    ) -> None:
        what = "is lost" if lost else "has refused a step"
        shown = ", ".join(loans[:3]) + (", …" if len(loans) > 3 else "")
        super().__init__(f"{creditor} {what} (loans: {shown or 'none'}): {reason.message}")
        self.creditor = creditor
        self.loans = tuple(loans)
        self.reason = reason
        self.lost = lost
        self.also: tuple[CreditorFailed, ...] = ()  # other creditors that failed in this layer

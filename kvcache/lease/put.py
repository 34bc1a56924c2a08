"""The interface of a put: one writer of one receive lease on a peer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from kvcache.types import PageId

__all__ = ["Put"]


class Put(Protocol):
    """A one-sided put with signal: writes into one receive lease of a peer.

    Calls queue their work and return at once. Another thread does the work in the order of the
    calls. The put keeps its first failure, skips all later work, and reports the failure in
    `close`.
    """

    bytes_sent: int
    claim: int  # what other workers of this sender join with

    def write(self, layers: range, pages: Sequence[PageId], begin: int, end: int) -> None:
        """Put positions `[begin, end)` of `layers`; `pages` are the sender's, from position 0.

        They may still be in the making: work that the caller has started on the pool's device is
        waited for, not by the caller. Layers are counted as in the sender's pool. What of them, and
        of their heads, the receiver's pool is not for is left out.
        """
        ...

    def signal(self, landed: int) -> None:
        """Raise the receiver's watermark to `landed` once all writes so far are complete.

        Where several workers of a sender write, it is for the lead to do, after the others' `close`
        is done for these positions too; for those who have joined it raises `Internal`.
        """
        ...

    def renew(self) -> None:
        """Show the receiver that the sender lives, while there is nothing to write yet."""
        ...

    @property
    def failed(self) -> bool:
        """Whether a call has failed; what follows is in vain."""
        ...

    def cancel(self) -> None:
        """Skip what has not been written yet."""
        ...

    def close(self) -> Future[None]:
        """Done when nothing of this put is or will be under way; carries the failure, if any.

        Only then may the sender's pages be given to somebody else.
        """
        ...

"""The interface of a put: one writer of one receive lease on a peer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvcache.types import PageId, TokenPos

__all__ = ["PageTable", "Put"]

PageTable = Sequence[PageId] | npt.NDArray[np.int32]


class Put(Protocol):
    """A one-sided put with signal: writes into one receive lease of a peer.

    Calls queue their work and return at once. Another thread does the work in the order of the
    calls. The put keeps its first failure, skips all later work, and reports the failure in
    `close`.
    """

    bytes_sent: int
    copy_s: float  # seconds spent on copying these bytes
    began: float  # before the first of these copies (time.monotonic()); 0: there was none
    claim: int  # the number with which other workers of this sender join

    def write(self, layers: range, pages: PageTable, begin: TokenPos, end: TokenPos) -> None:
        """Put positions `[begin, end)` of `layers`; `pages` are the sender's, from position 0.

        The pages may still be in computation: the put waits for the work that the caller has
        started on the pool's device, and the caller does not. Layer indices are those of the
        sender's pool. Layers and heads that the receiver's pool does not hold are skipped.
        """
        ...

    def signal(self, landed: TokenPos) -> None:
        """Raise the receiver's watermark to `landed` once all writes so far are complete.

        Where several workers of a sender write, only the lead signals, after the `close` of every
        other worker has completed for these positions.

        Raises: `Internal` if this put has joined another's claim.
        """
        ...

    def renew(self) -> None:
        """Tell the receiver that the sender is alive while there is nothing to write yet."""
        ...

    @property
    def failed(self) -> bool:
        """Whether a call has failed; later calls have no effect."""
        ...

    def cancel(self) -> None:
        """Skip everything that has not been written yet."""
        ...

    def close(self) -> Future[None]:
        """Return a future that completes when no work of this put remains; it carries the failure.

        Until then the sender's pages must not be reused.
        """
        ...

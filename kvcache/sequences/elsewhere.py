"""The interface of the blocks that lie with creditors, for a scheduler and a stepper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from kvcache.types import SeqId

__all__ = ["BlocksElsewhere", "FetchCause", "Loss"]


class FetchCause(StrEnum):
    """Why a block comes home."""

    CALLED_BACK = "called_back"  # its creditor wants the pages
    SWAP = "swap"  # the router has ordered it, to end a cycle of debts
    CHEAPER = "cheaper"  # than to ship queries to it


class Loss(NamedTuple):
    """What has ended of the blocks that lie with creditors."""

    blocks: int
    tokens: int  # to compute again


class BlocksElsewhere(Protocol):
    """Blocks of long sequences that lie with creditors. `kvcache.borrowing.Borrowing` is one.

    All calls belong to the thread that steps, between two steps.
    """

    # Called on any thread: a block has come, a move has ended, or blocks are lost.
    wake: Callable[[], object]

    @property
    def moved(self) -> int:
        """Blocks that have arrived at creditors, since the start."""
        ...

    @property
    def home(self) -> Mapping[str, int]:
        """Blocks that have come home since the start, by cause: a value of `FetchCause`."""
        ...

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        ...

    @property
    def total_pages(self) -> int:
        """All pages of the pool, but the scratch page."""
        ...

    @property
    def available_pages(self) -> int:
        """How many pages a sequence can get now, at most: those that are free or only cached."""
        ...

    @property
    def spare_pages(self) -> int:
        """How many more pages are available than may still be lent to others; below 0 if fewer."""
        ...

    def settle(self) -> int:
        """Let go of the local pages of blocks that have arrived, and take in those come home.

        Also fetches the blocks that are called back or ordered home, as far as there is room.
        Returns how many blocks have arrived or come home. Call it before each step.
        """
        ...

    def want(self, blocks: int) -> None:
        """Say how many borrowed blocks are needed soon, besides those in use."""
        ...

    def move_oldest(self, seq_id: SeqId, tokens: Sequence[int]) -> bool:
        """Begin to move the oldest block of a sequence whose pages can be let go.

        `tokens` are the sequence's own. Returns False if it has no such block, or if there is no
        borrowed block now.
        """
        ...

    def movable(self, seq_id: SeqId) -> bool:
        """Return whether a sequence has a block that `move_oldest` could move."""
        ...

    def moving(self, seq_id: SeqId) -> int:
        """Return how many blocks of a sequence are on their way."""
        ...

    def away(self, seq_id: SeqId) -> int:
        """Return how many blocks of a sequence lie with creditors."""
        ...

    def called_back(self, seq_id: SeqId) -> int:
        """Return how many blocks of a sequence have to leave their creditors."""
        ...

    @property
    def lacking(self) -> int:
        """Pages that blocks which are called back have found missing in the latest `settle`."""
        ...

    def came_to_stay(self, seq_id: SeqId) -> int:
        """Return how many blocks of a sequence were fetched because there is room for them."""
        ...

    def fetch_cheaper(self, seq_id: SeqId, rows: int, steps: int, leaving: int) -> int:
        """Begin to fetch a sequence's blocks where that is cheaper than to ship its queries.

        It is expected to compute `rows` further tokens, in `steps` steps. `leaving` pages stay
        available. Returns how many blocks are on their way home.
        """
        ...

    def most_rows(self, seq_id: SeqId) -> int | None:
        """Return how many rows of a sequence its creditors answer in a step; None: any number.

        Half of their limits is left to other sequences.
        """
        ...

    def fitting(self, rows: Sequence[tuple[SeqId, int]]) -> list[bool]:
        """Return which sequences, with so many rows each, fit what creditors answer in one step.

        Those that come first go first. One that is alone at a creditor always fits.
        """
        ...

    def local_pages(self, seq_id: SeqId) -> int:
        """Return how many pages of the pool a sequence holds."""
        ...

    def grow_some(self, seq_id: SeqId, length: int, leaving: int) -> int:
        """Make room for up to `length` tokens, with `leaving` pages still available.

        Returns how many of the next tokens have room: a step can compute these. Tokens behind a gap
        are present already, and are not among them.
        """
        ...

    def take_losses(self) -> Loss:
        """End the blocks whose loans are over, or that were called back and do not come home."""
        ...

    def recover(self, error: Exception, *, refusals: int) -> Loss | None:
        """End the blocks that a failed step has found lost.

        A creditor may refuse a step for a passing reason; with this error, it has done so
        `refusals` times in a row. Returns None for any other error.
        """
        ...

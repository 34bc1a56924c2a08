"""How eagerly an engine borrows, and how long it waits for creditors."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BorrowingSettings"]


@dataclass(frozen=True, slots=True)
class BorrowingSettings:
    """Times are in seconds.

    Free blocks that nobody wants go back once nobody has wanted or taken any for `surplus_s`, but
    for `stock` of them, which go back after `idle_s`.
    """

    tick_s: float = 0.05  # between two looks at the accounts, while there are any
    call_s: float = 1.0  # for an answer of a creditor; also between two renewals, at most
    send_s: float = 5.0  # for the KV of a block that comes home
    connect_s: float = 2.0  # for a connection over which queries are shipped
    rest_s: float = 0.5  # before a creditor is asked again that has refused
    longest_rest_s: float = 10.0  # before one is asked again that did not answer
    blocks: int = 4  # of a loan, at most: a loan is called back and freed as a whole
    stock: int = 2  # blocks
    surplus_s: float = 3.0
    idle_s: float = 10.0
    freeing_s: float = 60.0  # a loan whose answer never came is freed for so long

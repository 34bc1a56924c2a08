"""Borrowing: pages of other engines, as blocks for this engine's sequences.

`Borrowing` is the `Debtor` of `engine.borrowing` on a thread of its own, with calls over HTTP and
connections. May import `engine.borrowing`, `engine.web`, `engine.protocol` and `kvcache`; nothing
of the rooms beside it.
"""

from engine.borrowing import BorrowingSettings, HomeOrders
from engine.service.borrowing.borrowing import Borrowing

__all__ = ["Borrowing", "BorrowingSettings", "HomeOrders"]

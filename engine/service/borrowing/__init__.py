"""Borrowing: pages of other engines, as blocks for this engine's sequences.

`Borrowing` is a `kvcache.lending.BlockSource`: a thread for the keeper of `engine.borrowing`, calls
over HTTP, and connections. May import `engine.borrowing`, `engine.web`, `engine.protocol` and
`kvcache`; nothing of the rooms beside it.
"""

from engine.borrowing import BorrowingSettings, HomeOrders
from engine.service.borrowing.borrowing import Borrowing, BorrowingUse

__all__ = ["Borrowing", "BorrowingSettings", "BorrowingUse", "HomeOrders"]

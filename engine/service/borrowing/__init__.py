"""Borrowing: pages of other engines, as blocks for this engine's sequences.

`Borrowing` is a `kvcache.lending.BlockSource`. May import `engine.web`, `engine.protocol` and
`kvcache`; nothing of the rooms beside it.
"""

from engine.service.borrowing.borrowing import Borrowing, BorrowingUse
from engine.service.borrowing.orders import HomeOrders
from engine.service.borrowing.settings import BorrowingSettings

__all__ = ["Borrowing", "BorrowingSettings", "BorrowingUse", "HomeOrders"]

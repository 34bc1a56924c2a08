"""Pages lent between engines: the debtor's accounts and how they are kept, the creditor's answers.

`Debtor` is a `kvcache.lending.BlockSource`. Its keeper lives on any event loop, also on one in
virtual time: calls and connections are given to it. `LentPages` is the other side. May import
`engine.protocol` and `kvcache` without torch; starts no thread.
"""

from engine.borrowing.debtor import Debtor
from engine.borrowing.lent_pages import LentPages
from engine.borrowing.orders import HomeOrders
from engine.borrowing.peers import Links, LoanCalls
from engine.borrowing.records import BorrowingUse
from engine.borrowing.settings import BorrowingSettings

__all__ = [
    "BorrowingSettings",
    "BorrowingUse",
    "Debtor",
    "HomeOrders",
    "LentPages",
    "Links",
    "LoanCalls",
]

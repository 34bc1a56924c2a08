"""The debtor's accounts of borrowed pages, and how they are kept: asked for, renewed, given back.

`Keeper` lives on any event loop, also on one in virtual time: calls and connections are given to
it. May import `engine.protocol` and `kvcache` without torch; starts no thread.
"""

from engine.borrowing.accounts import Accounts
from engine.borrowing.asking import names_of
from engine.borrowing.keeper import Keeper, Tell
from engine.borrowing.orders import HomeOrders
from engine.borrowing.peers import Links, LoanCalls
from engine.borrowing.records import BorrowingUse, Process
from engine.borrowing.settings import BorrowingSettings

__all__ = [
    "Accounts",
    "BorrowingSettings",
    "BorrowingUse",
    "HomeOrders",
    "Keeper",
    "Links",
    "LoanCalls",
    "Process",
    "Tell",
    "names_of",
]

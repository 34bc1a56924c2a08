"""Pages lent to other instances and borrowed from them: the accounts of Infinite-LLM's rManager.

Accounts hold page numbers only. Imports no torch.
"""

from kvcache.lending.block_source import BlockSource, BorrowedBlock
from kvcache.lending.borrower import Borrower, Debt, Renewing
from kvcache.lending.failure import CreditorFailed
from kvcache.lending.lender import Lender
from kvcache.lending.loan import Loan, Notice, Renewal
from kvcache.lending.pool import LendablePages, LoanSlots

__all__ = [
    "BlockSource",
    "BorrowedBlock",
    "Borrower",
    "CreditorFailed",
    "Debt",
    "LendablePages",
    "Lender",
    "Loan",
    "LoanSlots",
    "Notice",
    "Renewal",
    "Renewing",
]

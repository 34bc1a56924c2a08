"""Pages lent to other instances and borrowed from them: the accounts of Infinite-LLM's rManager.

Accounts hold page numbers only. Imports no torch.
"""

from kvcache.lending.borrower import Borrower, Debt, Renewing
from kvcache.lending.lender import LendablePages, Lender
from kvcache.lending.loan import Loan, Notice, Renewal

__all__ = [
    "Borrower",
    "Debt",
    "LendablePages",
    "Lender",
    "Loan",
    "Notice",
    "Renewal",
    "Renewing",
]

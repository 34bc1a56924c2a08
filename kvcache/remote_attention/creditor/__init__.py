"""The side of an engine that has lent pages: it computes partial attention over them for debtors.

May import the exchange, and the rooms below `remote_attention`.
"""

from kvcache.remote_attention.creditor.creditor import Creditor, CreditorStatistics
from kvcache.remote_attention.creditor.loans import BadLoans, Debtor, PagesOfLoans

__all__ = ["BadLoans", "Creditor", "CreditorStatistics", "Debtor", "PagesOfLoans"]

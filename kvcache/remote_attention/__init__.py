"""Attention over KV in the pools of other engines: queries are shipped to it (DistAttention).

`creditor/` and `debtor/` are the two sides, `exchange/` is what passes between them. May import
`attention`, `transport` and the rooms below them.
"""

from kvcache.remote_attention.creditor import (
    BadLoans,
    Creditor,
    CreditorStatistics,
    Debtor,
    PagesOfLoans,
)
from kvcache.remote_attention.debtor import (
    Answer,
    CreditorFailed,
    CreditorLimits,
    DistributedPlan,
    Estimate,
    MeasuredFetchCost,
    RemoteAttention,
)
from kvcache.remote_attention.exchange import AttentionShape, BorrowedPages, Limits, RemoteSpan

__all__ = [
    "Answer",
    "AttentionShape",
    "BadLoans",
    "BorrowedPages",
    "Creditor",
    "CreditorFailed",
    "CreditorLimits",
    "CreditorStatistics",
    "Debtor",
    "DistributedPlan",
    "Estimate",
    "Limits",
    "MeasuredFetchCost",
    "PagesOfLoans",
    "RemoteAttention",
    "RemoteSpan",
]

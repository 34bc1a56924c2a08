"""Infinite-LLM's gManager: which instance has memory to lend, and who owes whom how much.

Decides on plain data. `CreditorLists` tells debtors by functions that it is given. Imports `base`
and `engine.protocol` only.
"""

from router.ledger.creditor_lists import CreditorLists, Debtor
from router.ledger.debts import Debts, net_positions, remote_pages, settle
from router.ledger.heartbeats import Heartbeats
from router.ledger.ledger import FRESH_S, Candidate, Ledger
from router.ledger.prefill import Part, plan_prefill
from router.ledger.swaps import Commit, Freeze, Order, SendHome, Swap, plan_swaps

__all__ = [
    "FRESH_S",
    "Candidate",
    "Commit",
    "CreditorLists",
    "Debtor",
    "Debts",
    "Freeze",
    "Heartbeats",
    "Ledger",
    "Order",
    "Part",
    "SendHome",
    "Swap",
    "net_positions",
    "plan_prefill",
    "plan_swaps",
    "remote_pages",
    "settle",
]

"""Infinite-LLM's gManager: which instance has memory to lend, and who owes whom how much.

Decides on plain data. `CreditorLists` and `Rebalancing` tell debtors by functions that they are
given. Imports `base` and `engine.protocol` only.
"""

from router.ledger.block_swap import BlockSwap
from router.ledger.creditor_lists import CreditorLists
from router.ledger.debtor import Debtor, block_pages
from router.ledger.debts import Debts, net_positions, remote_pages, settle
from router.ledger.heartbeats import Heartbeats
from router.ledger.ledger import FRESH_S, Candidate, Ledger
from router.ledger.rebalancing import Rebalancing
from router.ledger.swaps import Swap, plan_swaps

__all__ = [
    "FRESH_S",
    "BlockSwap",
    "Candidate",
    "CreditorLists",
    "Debtor",
    "Debts",
    "Heartbeats",
    "Ledger",
    "Rebalancing",
    "Swap",
    "block_pages",
    "net_positions",
    "plan_swaps",
    "remote_pages",
    "settle",
]

"""Pages lent between virtual engines: accounts and calls as of real ones, attention as time.

May import `engine.borrowing`, `engine.latency`, `engine.protocol`, `engine.scheduling`,
`engine.virtual.put` and what that imports, and `kvcache` without torch. Starts no thread.
"""

from engine.virtual.loans.attention import RemoteAttention, RemoteWork
from engine.virtual.loans.borrowing import AtOnce, VirtualBorrowing
from engine.virtual.loans.calls import VirtualLoanCalls
from engine.virtual.loans.fetch_cost import VirtualFetchCost
from engine.virtual.loans.links import VirtualLinks

__all__ = [
    "AtOnce",
    "RemoteAttention",
    "RemoteWork",
    "VirtualBorrowing",
    "VirtualFetchCost",
    "VirtualLinks",
    "VirtualLoanCalls",
]

"""The side of an engine that has borrowed pages: it ships queries and merges the parts.

May import the exchange, and the rooms below `remote_attention`.
"""

from kvcache.lending import CreditorFailed
from kvcache.remote_attention.debtor.answer_limits import CreditorLimits
from kvcache.remote_attention.debtor.channel import Answer
from kvcache.remote_attention.debtor.distributed_plan import DistributedPlan
from kvcache.remote_attention.debtor.estimates import Estimate
from kvcache.remote_attention.debtor.fetch_cost import MeasuredFetchCost
from kvcache.remote_attention.debtor.remote_attention import RemoteAttention

__all__ = [
    "Answer",
    "CreditorFailed",
    "CreditorLimits",
    "DistributedPlan",
    "Estimate",
    "MeasuredFetchCost",
    "RemoteAttention",
]

"""Attention over paged KV: a plan for a step, its backends, and attention over several pools.

May import `memory` and the rooms below it.
"""

from kvcache.attention.block_tree import BLOCK
from kvcache.attention.distributed import combine
from kvcache.attention.held import HeldSpan, Part
from kvcache.attention.partial import PartialAttention
from kvcache.attention.plan import HeldPlan, HeldPlanner, Plan, Planner, row_slots
from kvcache.attention.select import held_planner_for, planner_for
from kvcache.attention.ship_or_pull import ship_queries

__all__ = [
    "BLOCK",
    "HeldPlan",
    "HeldPlanner",
    "HeldSpan",
    "Part",
    "PartialAttention",
    "Plan",
    "Planner",
    "combine",
    "held_planner_for",
    "planner_for",
    "row_slots",
    "ship_queries",
]

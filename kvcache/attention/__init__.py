"""Attention over paged KV: a plan for a step, and its backends.

May import `memory` and the rooms below it.
"""

from kvcache.attention.block_tree import BLOCK
from kvcache.attention.plan import Plan, Planner, row_slots
from kvcache.attention.select import planner_for

__all__ = ["BLOCK", "Plan", "Planner", "planner_for", "row_slots"]

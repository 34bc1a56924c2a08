"""Attention over paged KV: a plan for a step, its backends, and attention over several pools.

May import `memory` and the rooms below it.
"""

from kvcache.attention.block_tree import BLOCK, nodes_of
from kvcache.attention.distributed import combine
from kvcache.attention.gpu.decode_plan import DecodePlan, DecodePlans
from kvcache.attention.gpu.flashinfer import FlashInfer
from kvcache.attention.held import HeldSpan, Part, Ranges, split_parts
from kvcache.attention.merge_plan import MergedSpan, MergePlan, PartRows
from kvcache.attention.partial import PartialAttention
from kvcache.attention.plan import HeldPlan, HeldPlanner, Plan, Planner, row_slots
from kvcache.attention.select import held_planner_for, planner_for

__all__ = [
    "BLOCK",
    "DecodePlan",
    "DecodePlans",
    "FlashInfer",
    "HeldPlan",
    "HeldPlanner",
    "HeldSpan",
    "MergePlan",
    "MergedSpan",
    "Part",
    "PartRows",
    "PartialAttention",
    "Plan",
    "Planner",
    "Ranges",
    "combine",
    "held_planner_for",
    "nodes_of",
    "planner_for",
    "row_slots",
    "split_parts",
]

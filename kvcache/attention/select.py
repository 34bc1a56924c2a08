"""Selection of the attention plans for a pool."""

from __future__ import annotations

import logging
from functools import partial

import torch

from kvcache.attention.distributed import StableHeldPlan
from kvcache.attention.plan import HeldPlanner, Planner
from kvcache.attention.stable import StablePlan
from kvcache.memory import KVLayout

__all__ = ["held_planner_for", "planner_for"]

log = logging.getLogger(__name__)


def planner_for(layout: KVLayout, group: int, device: torch.device) -> Planner:
    """Return the fastest planner for a pool on `device`; `group` = query heads per KV head.

    In float32 this is always the bit-stable `StablePlan`. Other dtypes use FlashInfer on CUDA,
    and `Bf16Plan` for bfloat16 on CPUs, where these are available.
    """
    if layout.dtype != torch.float32 and device.type == "cuda":
        try:
            from kvcache.attention.flashinfer import FlashInfer, supports

            if supports(layout):
                return FlashInfer(layout, group, device).plan
            shape = f"heads of {layout.head_dim} in {layout.dtype}"
            log.warning("attention is slow here: FlashInfer has no kernels for %s", shape)
        except (ImportError, RuntimeError) as error:  # RuntimeError: incompatible versions
            log.warning("attention is slow here: %s (pip install -e '.[cuda]' in the clone)", error)
    if layout.dtype == torch.bfloat16 and device.type == "cpu":
        try:
            from kvcache.attention.cpu_bf16 import Bf16Plan, precompile
        except (ImportError, RuntimeError) as error:  # RuntimeError: numba's cache is not writable
            log.warning("attention in bfloat16 is slow here: %s", error)
        else:
            heads, dim, page_size = layout.held.heads, layout.head_dim, layout.page_size
            precompile(heads, group, dim, page_size)
            return partial(Bf16Plan, kv_heads=heads, group=group, dim=dim, page_size=page_size)
    return partial(StablePlan, page_size=layout.page_size, group=group, device=device)


def held_planner_for(layout: KVLayout, group: int, device: torch.device) -> HeldPlanner:
    """Return the planner of partial results over held pages of a pool on `device`.

    `group` is the number of query heads per KV head. In bfloat16 on CPUs it uses the kernels of
    `Bf16Plan`, where these are available; otherwise it is `StableHeldPlan`, whose parts merge in
    float32 to the bits of `StablePlan`.
    """
    if layout.dtype == torch.bfloat16 and device.type == "cpu":
        try:
            from kvcache.attention.held_bf16 import Bf16HeldPlan
        except (ImportError, RuntimeError) as error:  # RuntimeError: numba's cache is not writable
            log.warning("attention in bfloat16 is slow here: %s", error)
        else:
            heads, dim, page_size = layout.held.heads, layout.head_dim, layout.page_size
            return partial(Bf16HeldPlan, kv_heads=heads, group=group, dim=dim, page_size=page_size)
    return partial(StableHeldPlan, page_size=layout.page_size, group=group, device=device)

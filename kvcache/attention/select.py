"""Selection of the attention plans for a pool."""

from __future__ import annotations

import logging
from functools import partial
from typing import TypedDict

import torch

from kvcache.attention.distributed import StableHeldPlan
from kvcache.attention.partial import stable_kernel
from kvcache.attention.plan import HeldPlanner, Planner
from kvcache.attention.stable import StablePlan
from kvcache.memory import KVLayout

__all__ = ["held_planner_for", "planner_for"]

log = logging.getLogger(__name__)


class _StableShape(TypedDict):
    kv_heads: int
    group: int
    page_size: int


class _Bf16Shape(_StableShape):
    dim: int


def planner_for(layout: KVLayout, group: int, device: torch.device) -> Planner:
    """Return the fastest planner for a pool on `device`; `group` = query heads per KV head.

    In float32 this is always bit-stable: `CpuStablePlan` on CPUs with its kernel, `StablePlan`
    otherwise. Other dtypes use FlashInfer on CUDA, and `Bf16Plan` for bfloat16 on CPUs, where these
    are available.
    """
    if layout.dtype != torch.float32 and device.type == "cuda":
        try:
            from kvcache.attention.gpu.flashinfer import FlashInfer, supports

            if supports(layout):
                return FlashInfer(layout, group, device)
            heads = f"heads of {layout.head_dim} in {layout.dtype}"
            log.warning("attention is slow here: FlashInfer has no kernels for %s", heads)
        except (ImportError, RuntimeError) as error:  # RuntimeError: incompatible versions
            log.warning("attention is slow here: %s (pip install -e '.[cuda]' in the clone)", error)
    if _has_stable_kernel(layout, device):
        from kvcache.attention.stable_cpu import CpuStablePlan

        return partial(CpuStablePlan, **_stable_shape(layout, group))
    if _has_bf16_kernels(layout, device):
        from kvcache.attention.cpu_bf16 import Bf16Plan, precompile

        shape = _bf16_shape(layout, group)
        precompile(**shape)
        return partial(Bf16Plan, **shape)
    return partial(StablePlan, page_size=layout.page_size, group=group, device=device)


def held_planner_for(layout: KVLayout, group: int, device: torch.device) -> HeldPlanner:
    """Return the planner of partial results over held pages of a pool on `device`.

    `group` is the number of query heads per KV head. In bfloat16 on CPUs it uses the kernels of
    `Bf16Plan`, where these are available. In float32 its parts merge to the bits of the plan that
    `planner_for` gives: `CpuStableHeldPlan` or `StableHeldPlan`.
    """
    if _has_stable_kernel(layout, device):
        from kvcache.attention.stable_cpu import CpuStableHeldPlan

        return partial(CpuStableHeldPlan, **_stable_shape(layout, group))
    if _has_bf16_kernels(layout, device):
        from kvcache.attention.held_bf16 import Bf16HeldPlan

        return partial(Bf16HeldPlan, **_bf16_shape(layout, group))
    return partial(StableHeldPlan, page_size=layout.page_size, group=group, device=device)


def _has_stable_kernel(layout: KVLayout, device: torch.device) -> bool:
    return layout.dtype == torch.float32 and device.type == "cpu" and stable_kernel() is not None


def _has_bf16_kernels(layout: KVLayout, device: torch.device) -> bool:
    """Return whether the kernels for bfloat16 on CPUs serve the pool; say why if they should."""
    if layout.dtype != torch.bfloat16 or device.type != "cpu":
        return False
    try:
        import kvcache.attention.cpu_bf16  # noqa: F401
    except (ImportError, RuntimeError) as error:  # RuntimeError: numba's cache is not writable
        log.warning("attention in bfloat16 is slow here: %s", error)
        return False
    return True


def _stable_shape(layout: KVLayout, group: int) -> _StableShape:
    return {"kv_heads": layout.held.heads, "group": group, "page_size": layout.page_size}


def _bf16_shape(layout: KVLayout, group: int) -> _Bf16Shape:
    return {**_stable_shape(layout, group), "dim": layout.head_dim}

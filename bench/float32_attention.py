"""What the kernel of float32 attention on CPUs takes, against torch's operations and memory.

Purpose: float32 attention has to give a row the same bits in any batch and any chunk. Torch's
operations give that in blocks of padded rows, gathered, transposed and masked by a dozen calls
(`kvcache.attention.stable`). The kernel (`kvcache.attention.stable_cpu`) reads the pages in place.

Theory: a decode reads the KV of its context once, `2·kv_heads·head_dim·4` bytes per token and
layer. So it takes at least the time in which a core reads as many bytes (`read`). A chunk of a
prompt is bound by arithmetic.

How: SmolLM2's shape, one thread, a pool of all its layers, so that no layer is in a cache when its
turn comes. Each sample goes through all layers. The sides take turns, `REPEATS` times; a ratio is
the median of the repeats' own ratios. `read` sums as many numbers as the KV has.

Run: `make bench-float32-attention`, or `python -m bench.float32_attention [--save]`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.report import only_save, publish, spread, table
from kvcache.attention.plan import Plan
from kvcache.attention.stable import StablePlan
from kvcache.attention.stable_cpu import CpuStablePlan
from kvcache.sequences import Span
from kvcache.types import TokenPos

LAYERS, PAGE_SIZE, KV_HEADS, GROUP, HEAD_DIM = 30, 16, 3, 3, 64  # SmolLM2's shape
CPU = torch.device("cpu")
REPEATS = 7
WORK = {  # sequences, rows of each, and tokens of the context with them
    "decode, 1 sequence of 500": (1, 1, 500),
    "decode, 1 sequence of 3000": (1, 1, 3000),
    "decode, 1 sequence of 6000": (1, 1, 6000),
    "decode, 8 sequences of 500": (8, 1, 500),
    "a chunk of 512 at the start": (1, 512, 512),
    "a chunk of 512 at the end of 3000": (1, 512, 3000),
}


def main() -> None:
    """Measure, print the table, publish the JSON."""
    only_save(__doc__)
    torch.set_num_threads(1)
    figures = {name: measure(*work) for name, work in WORK.items()}
    table(
        "attention of one step in all layers, one thread",
        ["", "kernel, ms", "torch, ms", "torch / kernel", "kernel / read"],
        [
            [
                name,
                *(f"{found[side]['median']:.1f}" for side in ("kernel_ms", "torch_ms")),
                f"{found['torch_vs_kernel']['median']:.2f}",
                f"{found['kernel_vs_read']['median']:.2f}",
            ]
            for name, found in figures.items()
        ],
    )
    publish("float32_attention", figures)


def measure(sequences: int, rows: int, length: int) -> dict[str, Any]:
    """Return the times of both sides, and of reading the KV."""
    each = -(-length // PAGE_SIZE)
    pool = torch.randn(LAYERS, 1 + sequences * each, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    order = 1 + torch.randperm(sequences * each).int().numpy()
    spans = [
        Span(number * rows, TokenPos(length - rows), rows, np.array(pages, np.int32))
        for number, pages in enumerate(np.split(order, sequences))
    ]
    q = torch.randn(sequences * rows, KV_HEADS * GROUP, HEAD_DIM)
    kernel = CpuStablePlan(spans, page_size=PAGE_SIZE, kv_heads=KV_HEADS, group=GROUP)
    torch_plan = StablePlan(spans, PAGE_SIZE, GROUP, CPU)
    sides: dict[str, Callable[[], object]] = {
        "kernel": partial(_attend, kernel, pool, q),
        "torch": partial(_attend, torch_plan, pool, q),
        "read": lambda: [layer[1:].sum() for layer in pool],
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(REPEATS + 1):
        for name, side in sides.items():
            began = time.perf_counter()
            side()
            if repeat:  # the first one warms up
                times[name].append((time.perf_counter() - began) * 1e3)
    ratios = {
        f"{above}_vs_{below}": spread(
            [a / b for a, b in zip(times[above], times[below], strict=True)]
        )
        for above, below in (("torch", "kernel"), ("kernel", "read"))
    }
    return {**{f"{name}_ms": spread(values) for name, values in times.items()}, **ratios}


def _attend(plan: Plan, pool: torch.Tensor, q: torch.Tensor) -> None:
    for layer in pool:
        plan.attend(layer, q)


if __name__ == "__main__":
    main()

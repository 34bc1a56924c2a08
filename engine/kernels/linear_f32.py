"""float32 products with packed weights, whose rows have the same bits however many there are.

Each output is one chain of fused multiplications and additions over the inputs in order
(`kvcache.kernels.exact_f32`). MKL, of which the strict mode has to be asked for that, takes about
twice as long with a few rows, and somewhat longer with many (`bench/LOG.md`). The packed weight is
`[out / 16, in, 16]`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from torch import Tensor

from kvcache.kernels.exact_f32 import WIDTH, available, multiply
from kvcache.kernels.jit import ParallelKernel, exact_jit, f32_at, i64_at, next_item

__all__ = ["kernel", "pack", "packed_rows", "product", "supports"]

ROWS: Final = 96  # of x that stay in the cache while panels of the weight pass
PANELS: Final = 4  # of a work item
PARALLEL: Final = 1 << 17  # products from which waking other threads pays


def supports(outputs: int, inputs: int) -> bool:
    """Return whether this kernel takes a weight `[outputs, inputs]`, which must be whole panels."""
    return available() and outputs % WIDTH == 0 and inputs > 0


def pack(weight: Tensor) -> Tensor:
    """Return a weight `[out, in]` packed as `[out / 16, in, 16]`."""
    outputs, inputs = weight.shape
    return weight.view(outputs // WIDTH, WIDTH, inputs).transpose(1, 2).contiguous()


def packed_rows(packed: Tensor, indices: Tensor) -> Tensor:
    """Return rows of a packed weight, `[len(indices), in]`."""
    return packed[indices // WIDTH, :, indices % WIDTH]


def product(x: Tensor, packed: Tensor, bias: Tensor) -> Tensor:
    """Return x · weightᵀ + bias, `[rows, out]`; `x` is `[rows, in]`, `bias` `[out]`."""
    x = x.contiguous()
    (rows, inputs), outputs = x.shape, len(bias)
    out = x.new_empty((rows, outputs))
    groups = -(-len(packed) // PANELS)
    run = kernel().run_parallel if rows * outputs * inputs >= PARALLEL else kernel().run_serial
    run(
        groups * -(-rows // ROWS), x.data_ptr(), packed.data_ptr(), bias.data_ptr(),
        out.data_ptr(), rows, outputs, inputs, groups,
    )  # fmt: skip
    return out


@exact_jit
def _multiply(item: Any, a: Any) -> None:
    """Compute the columns of some panels for some rows."""
    rows, outputs, inputs, groups = a[6], a[7], a[8], a[9]
    first = item // groups * ROWS
    count = min(ROWS, rows - first)
    panel = item % groups * PANELS
    for p in range(panel, min(panel + PANELS, outputs // WIDTH)):
        to = a[5] + 4 * (first * outputs + p * WIDTH)
        multiply(
            a[2] + 4 * first * inputs, 4 * inputs, a[3] + 4 * p * WIDTH * inputs, to, 4 * outputs,
            count, inputs,
        )  # fmt: skip
        bias = f32_at(a[4] + 4 * p * WIDTH)
        for row in range(count):
            out = f32_at(to + 4 * row * outputs)
            for n in range(WIDTH):
                out[n] += bias[n]


@cache
def kernel() -> ParallelKernel:
    """Compile the kernel, which takes seconds the first time. Only where `supports` holds."""

    def products(address: Any) -> None:
        item = next_item(address)
        while item >= 0:
            _multiply(item, i64_at(address))
            item = next_item(address)

    return ParallelKernel(products, exact=True)

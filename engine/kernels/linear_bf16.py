"""bfloat16 products with packed weights, on CPUs with AVX-512 BF16.

With few rows, a product should take as long as reading the weight; oneDNN takes up to three
quarters longer. With many rows both take the same time (`bench/LOG.md`). The packed weight is
`[out / 64, in / 2, 64, 2]`, as in oneDNN: blocks of 64 outputs, in which VDPBF16PS multiplies pairs
of elements of x with pairs of the weight and adds the products in float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from kvcache.kernels.avx512_bf16 import (
    I16,
    I64,
    LANES,
    available,
    clamped_rows,
    has_feature,
    load,
    numba_ir,
    offset,
    round_to_bf16,
    store,
    widen_bf16,
)
from kvcache.kernels.gemm_tile import WIDTH, accumulate
from kvcache.kernels.jit import ParallelKernel, i64_at, next_item

__all__ = ["kernel", "pack", "packed_rows", "product", "supports"]

AHEAD: Final = 16  # how many steps in advance weights are prefetched
WORDS: Final = ir.VectorType(I16, LANES)


def supports(outputs: int, inputs: int) -> bool:
    """Return whether this kernel takes a weight `[outputs, inputs]`, which must be whole blocks.

    False on processors with AMX, which oneDNN uses and which is faster for many rows.
    """
    return available() and not has_feature("amx-bf16") and outputs % WIDTH == 0 and inputs % 2 == 0


def pack(weight: Tensor) -> Tensor:
    """Return a weight `[out, in]` packed as `[out / 64, in / 2, 64, 2]`."""
    outputs, inputs = weight.shape
    blocks = weight.view(outputs // WIDTH, WIDTH, inputs // 2, 2)
    return blocks.transpose(1, 2).contiguous()


def packed_rows(packed: Tensor, indices: Tensor) -> Tensor:
    """Return rows of a packed weight, `[len(indices), in]`."""
    return packed[indices // WIDTH, :, indices % WIDTH].flatten(1)


def product(x: Tensor, packed: Tensor, bias: Tensor) -> Tensor:
    """Return x · weightᵀ + bias, `[rows, out]`; `x` is `[rows, in]`, `bias` `[out]`."""
    x = x.contiguous()
    (rows, inputs), outputs = x.shape, len(bias)
    out = x.new_empty((rows, outputs))
    kernel().run_parallel(
        len(packed), x.data_ptr(), packed.data_ptr(), bias.data_ptr(), out.data_ptr(), rows,
        outputs, inputs,
    )  # fmt: skip
    return out


@cache
def kernel() -> ParallelKernel:
    """Compile the kernel, which takes seconds the first time.

    Call this only where `supports` holds: without AVX-512 BF16, LLVM aborts the process.
    """
    return ParallelKernel(_product)


def _tile(rows: int) -> Any:
    """Return a numba function that computes `rows` rows of 64 outputs.

    It takes the addresses of the first element of x, weight, bias and out; the number of rows of x
    that are left, at least one; and the outputs and inputs of the weight.
    """

    @intrinsic
    def tile(
        typing: Any, x: Any, weight: Any, bias: Any, out: Any, left: Any, wide: Any, length: Any
    ) -> Any:
        return types.void(*[types.int64] * 7), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, weight, bias, out, left, wide, length = arguments
        # With fewer rows left than the tile has, the last one is computed repeatedly.
        row_indices = clamped_rows(builder, rows, left)
        x_rows = [offset(builder, x, builder.mul(row, length), 2) for row in row_indices]
        count = WIDTH // LANES
        start = [
            widen_bf16(builder, load(builder, offset(builder, bias, I64(n * LANES), 2), WORDS))
            for n in range(count)
        ]
        sums = [
            numba_ir.alloca_once_value(builder, start[n]) for _ in range(rows) for n in range(count)
        ]
        accumulate(builder, sums, x_rows, weight, length, ahead=AHEAD)
        for m, row in enumerate(row_indices):
            begin = offset(builder, out, builder.mul(row, wide), 2)
            for n in range(count):
                bits = round_to_bf16(builder, builder.load(sums[m * count + n]))
                store(builder, bits, builder.add(begin, I64(2 * LANES * n)), 2)
        return context.get_dummy_value()

    return tile


_tile_1 = _tile(1)
_tile_2 = _tile(2)
_tile_4 = _tile(4)
_tile_6 = _tile(6)


def _product(address: Any) -> None:
    a = i64_at(address)
    x, weight, bias, out, rows, outputs, inputs = a[2], a[3], a[4], a[5], a[6], a[7], a[8]
    item = next_item(address)
    while item >= 0:
        n = item * WIDTH
        w, b = weight + 2 * n * inputs, bias + 2 * n
        m = 0
        while m < rows:
            left = rows - m
            xm, to = x + 2 * m * inputs, out + 2 * (m * outputs + n)
            m += 6
            if left > 4:
                _tile_6(xm, w, b, to, left, outputs, inputs)
            elif left > 2:
                _tile_4(xm, w, b, to, left, outputs, inputs)
            elif left > 1:
                _tile_2(xm, w, b, to, left, outputs, inputs)
            else:
                _tile_1(xm, w, b, to, left, outputs, inputs)
        item = next_item(address)

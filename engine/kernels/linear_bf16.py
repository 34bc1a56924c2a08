"""Products in bfloat16 with a weight that is laid out for them, with AVX-512 BF16.

Of few rows such a product should take what reading the weight takes, and oneDNN's takes up to
three quarters longer; of many rows both take the same time (`bench/LOG.md`). The weight is
`[out / 64, in / 2, 64, 2]`, which is how oneDNN packs it too: blocks of 64 outputs, for which
`vdpbf16ps` multiplies pairs of numbers of x with pairs of the weight and adds them in float32.
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
    at,
    available,
    clamped,
    has,
    load,
    numba_ir,
    rounded,
    store,
    widened,
)
from kvcache.kernels.gemm_tile import WIDTH, accumulate
from kvcache.kernels.jit import Shared, i64_at, next_item

__all__ = ["compiled", "fits", "pack", "product", "rows_of"]

AHEAD: Final = 16  # steps whose weights are fetched before their turn
WORDS: Final = ir.VectorType(I16, LANES)


def fits(outputs: int, inputs: int) -> bool:
    """Whether a weight `[outputs, inputs]` is made of whole blocks, and nothing of this processor
    is faster: AMX, which oneDNN uses, is, for many rows."""
    return available() and not has("amx-bf16") and outputs % WIDTH == 0 and inputs % 2 == 0


def pack(weight: Tensor) -> Tensor:
    """A weight `[out, in]` as `[out / 64, in / 2, 64, 2]`."""
    outputs, inputs = weight.shape
    blocks = weight.view(outputs // WIDTH, WIDTH, inputs // 2, 2)
    return blocks.transpose(1, 2).contiguous()


def rows_of(packed: Tensor, indices: Tensor) -> Tensor:
    """Rows of a packed weight, `[len(indices), in]`."""
    return packed[indices // WIDTH, :, indices % WIDTH].flatten(1)


def product(x: Tensor, packed: Tensor, bias: Tensor) -> Tensor:
    """x · weightᵀ + bias, `[rows, out]`, of x `[rows, in]`, a packed weight, and bias `[out]`."""
    x = x.contiguous()
    (rows, inputs), outputs = x.shape, len(bias)
    out = x.new_empty((rows, outputs))
    compiled().together(
        len(packed), x.data_ptr(), packed.data_ptr(), bias.data_ptr(), out.data_ptr(), rows,
        outputs, inputs,
    )  # fmt: skip
    return out


@cache
def compiled() -> Shared:
    """What does the work; it takes seconds the first time. Only where a weight `fits`: for lesser
    processors LLVM ends the process."""
    return Shared(_products)


def _tile(rows: int) -> Any:
    """A function (x, weight, bias, out: addresses of the tile's first numbers; rows that there are
    of x, at least one; outputs and inputs of the weight)."""

    @intrinsic
    def tile(
        typing: Any, x: Any, weight: Any, bias: Any, out: Any, left: Any, wide: Any, length: Any
    ) -> Any:
        return types.void(*[types.int64] * 7), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, weight, bias, out, left, wide, length = arguments
        # Where there are fewer rows than the tile has, the last one is computed more than once.
        which = clamped(builder, rows, left)
        x_rows = [at(builder, x, builder.mul(row, length), 2) for row in which]
        count = WIDTH // LANES
        start = [
            widened(builder, load(builder, at(builder, bias, I64(n * LANES), 2), WORDS))
            for n in range(count)
        ]
        sums = [
            numba_ir.alloca_once_value(builder, start[n]) for _ in range(rows) for n in range(count)
        ]
        accumulate(builder, sums, x_rows, weight, length, ahead=AHEAD)
        for m, row in enumerate(which):
            begin = at(builder, out, builder.mul(row, wide), 2)
            for n in range(count):
                bits = rounded(builder, builder.load(sums[m * count + n]))
                store(builder, bits, builder.add(begin, I64(2 * LANES * n)), 2)
        return context.get_dummy_value()

    return tile


_tile_1 = _tile(1)
_tile_2 = _tile(2)
_tile_4 = _tile(4)
_tile_6 = _tile(6)


def _products(address: Any) -> None:
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

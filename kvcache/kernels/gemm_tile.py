"""Register tiles of bfloat16 matrix products (AVX-512 BF16): as fast as oneDNN's, and in place.

A tile is up to `ROWS` rows by `WIDTH` columns of the product, accumulated in registers. Each step
multiplies a pair of consecutive elements of each row with a pair of each column and adds the
products in float32 (VDPBF16PS). The right-hand side is therefore stored in pairs:
`[depth / 2, WIDTH, 2]`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvcache.kernels.avx512_bf16 import (
    FLOATS,
    I32,
    I64,
    INTS,
    LANES,
    broadcast,
    dpbf16,
    load,
    numba_ir,
    prefetch,
    store,
)

__all__ = ["ROWS", "WIDTH", "accumulate", "multiply", "multiply_add"]

ROWS = 6  # 6 · 4 sums, one row's pair and 4 vectors of columns take 29 of 32 registers
WIDTH = 64


def accumulate(
    builder: Any, sums: list[Any], rows: list[Any], b: Any, depth: Any, ahead: int = 0
) -> None:
    """Add rows · b to `sums`, float32 vector variables `[rows, WIDTH / LANES]`.

    `rows` are addresses of rows of `depth` bfloat16, `b` is the address of `[depth / 2, WIDTH, 2]`.
    With `ahead`, b is prefetched that many steps in advance.
    """
    with numba_ir.for_range(builder, builder.lshr(depth, I64(1)), intp=I64) as loop:
        step = builder.add(b, builder.mul(loop.index, I64(4 * WIDTH)))
        columns = []
        for n in range(WIDTH // LANES):
            place = builder.add(step, I64(64 * n))
            if ahead:
                prefetch(builder, builder.add(place, I64(ahead * 4 * WIDTH)))
            columns.append(load(builder, place, INTS))
        pair = builder.mul(loop.index, I64(4))
        for m, row in enumerate(rows):
            row_pair = broadcast(builder, load(builder, builder.add(row, pair), I32))
            for n, column in enumerate(columns):
                dpbf16(builder, sums[m * len(columns) + n], row_pair, column)


def _gemm_tile(*, add: bool) -> Any:
    """Return a numba function (a, b, c, depth, a_row, c_row) that computes c = a · b.

    a, b and c are addresses: a of `[ROWS, depth]` and b of `[depth / 2, WIDTH, 2]`, both bfloat16,
    c of `[ROWS, WIDTH]` float32. `a_row` and `c_row` are the row strides of a and c in bytes;
    depth is even. With `add`, the function takes `scale` too, the address of `[ROWS]` float32, and
    computes c = c · scale + a · b, row by row.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, c, depth, a_row, c_row, *scale = arguments
        rows = [builder.add(a, builder.mul(I64(m), a_row)) for m in range(ROWS)]
        sums = []
        for m in range(ROWS):
            begin = builder.add(c, builder.mul(I64(m), c_row))
            places = [builder.add(begin, I64(64 * n)) for n in range(WIDTH // LANES)]
            for place in places:
                value = ir.Constant(FLOATS, None)
                if add:
                    factor = load(builder, builder.add(scale[0], I64(4 * m)), I32)
                    factors = builder.bitcast(broadcast(builder, factor), FLOATS)
                    value = builder.fmul(load(builder, place, FLOATS), factors)
                total = numba_ir.alloca_once_value(builder, value)
                sums.append((total, place))
        accumulate(builder, [total for total, _ in sums], rows, b, depth)
        for total, place in sums:
            store(builder, builder.load(total), place, 4)
        return context.get_dummy_value()

    if add:

        @intrinsic
        def tile_add(
            context: Any, a: Any, b: Any, c: Any, depth: Any, a_row: Any, c_row: Any, scale: Any
        ) -> Any:
            return types.void(*[types.int64] * 7), generate

        return tile_add

    @intrinsic
    def tile(context: Any, a: Any, b: Any, c: Any, depth: Any, a_row: Any, c_row: Any) -> Any:
        return types.void(*[types.int64] * 6), generate

    return tile


multiply = _gemm_tile(add=False)
multiply_add = _gemm_tile(add=True)

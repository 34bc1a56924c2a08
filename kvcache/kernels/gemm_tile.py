"""Tiles of a product in bfloat16, on processors with AVX-512 BF16: as fast as oneDNN's, in place.

A tile is a few rows by `WIDTH` columns, all of it in registers: in a step, pairs of numbers of each
row are multiplied with pairs of each column, and added in float32 (`vdpbf16ps`). So the right side
has to lie in pairs: `[depth / 2, WIDTH, 2]`.
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
    add_pairs,
    everywhere,
    load,
    numba_ir,
    prefetch,
    store,
)

__all__ = ["ROWS", "WIDTH", "accumulate", "multiply", "multiply_add"]

ROWS = 6  # 6 · 4 sums, a row's pair and 4 columns' are 29 of the processor's 32 registers
WIDTH = 64


def accumulate(
    builder: Any, sums: list[Any], rows: list[Any], b: Any, depth: Any, ahead: int = 0
) -> None:
    """To variables of `[rows, WIDTH / LANES]` sums, rows of `depth` numbers times b, as above; rows
    and b are addresses. With `ahead`, of b so many steps are fetched before their turn."""
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
            mine = everywhere(builder, load(builder, builder.add(row, pair), I32))
            for n, column in enumerate(columns):
                add_pairs(builder, sums[m * len(columns) + n], mine, column)


def _tile(*, add: bool) -> Any:
    """A function (a, b, c, depth, a_row, c_row; and with `add` scale): c = a · b.

    a is `[ROWS, depth]`, b `[depth / 2, WIDTH, 2]`, both bfloat16, and c `[ROWS, WIDTH]` float32:
    addresses, with bytes between the rows of a and c; depth is even. With `add` it is
    c · scale + a · b, scale `[ROWS]` float32.
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
                    by = everywhere(builder, load(builder, builder.add(scale[0], I64(4 * m)), I32))
                    value = load(builder, place, FLOATS)
                    value = builder.fmul(value, builder.bitcast(by, FLOATS))
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


multiply = _tile(add=False)
multiply_add = _tile(add=True)

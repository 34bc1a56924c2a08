"""Products of few rows in bfloat16 with a weight in int8, on processors with AVX-512 BF16.

Such a product should take what reading the weight takes. Torch's own (`_weight_int8pack_mm`) takes
twice that on one core, and with more rows loses to bfloat16 weights (`bench/LOG.md`): it multiplies
in float32, and the processor does not read ahead where rows of the weight are read side by side.

A tile is the product of `rows` rows of x with `outputs` rows of the weight, 32 numbers at a time:
the weights are widened to bfloat16, which has all of int8, and `vdpbf16ps` adds the products of
pairs in float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from kvcache.kernels.avx512_bf16 import (
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    add_pairs,
    assembled,
    at,
    available,
    clamped,
    load,
    numba_ir,
    prefetch,
    rounded,
    store,
    widened,
)
from kvcache.kernels.jit import Shared, i64_at, next_item

__all__ = ["compiled", "fits", "product"]

STEP = 32  # numbers of a row at a time
AHEAD = 6  # tiles whose weights are fetched before their turn
ITEM = 64  # outputs of an item

BYTES = ir.VectorType(I8, LANES)


def fits(outputs: int, inputs: int) -> bool:
    """Whether the processor can, and a weight `[outputs, inputs]` is made of whole tiles."""
    return available() and outputs >= 4 and inputs % STEP == 0


def product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x · weightᵀ · scale, `[rows, out]`, of x `[rows, in]`, weight `[out, in]`, scale `[out]`."""
    x = x.contiguous()
    rows, (outputs, inputs) = len(x), weight.shape
    out = x.new_empty((rows, outputs))
    compiled().together(
        -(-outputs // ITEM), x.data_ptr(), weight.data_ptr(), scale.data_ptr(), out.data_ptr(),
        rows, outputs, inputs,
    )  # fmt: skip
    return out


@cache
def compiled() -> Shared:
    """What does the work; it takes seconds the first time. Only where a weight `fits`: for lesser
    processors LLVM ends the process."""
    return Shared(_products)


def _tile(rows: int, outputs: int) -> Any:
    """A function (x, weight, scale, out: addresses of the tile's first numbers; rows that there are
    of x, at least one; rows between those of out; length of a row of x and weight)."""

    @intrinsic
    def tile(
        typing: Any, x: Any, w: Any, scale: Any, out: Any, left: Any, wide: Any, k: Any
    ) -> Any:
        return types.void(*[types.int64] * 7), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, weight, scale, out, left, wide, length = arguments
        # Where there are fewer rows than the tile has, the last one is computed more than once.
        which = clamped(builder, rows, left)
        x_rows = [at(builder, x, builder.mul(row, length), 2) for row in which]
        weights = [at(builder, weight, builder.mul(I64(n), length), 1) for n in range(outputs)]
        ahead = builder.mul(I64(AHEAD * outputs), length)
        sums = [
            numba_ir.alloca_once_value(builder, ir.Constant(FLOATS, None))
            for _ in range(rows * outputs)
        ]
        with numba_ir.for_range_slice(builder, I64(0), length, I64(STEP), I64) as (here, _):
            pairs_of = []
            for begin in weights:
                address = builder.add(begin, here)
                prefetch(builder, builder.add(address, ahead))
                low, high = (
                    builder.sitofp(
                        builder.sext(load(builder, builder.add(address, I64(o)), BYTES), INTS),
                        FLOATS,
                    )
                    for o in (0, LANES)
                )
                pairs_of.append(assembled(builder, "vcvtne2ps2bf16 $1, $2, $0", INTS, low, high))
            for m, begin in enumerate(x_rows):
                row = load(builder, at(builder, begin, here, 2), INTS)
                for n, pairs in enumerate(pairs_of):
                    add_pairs(builder, sums[m * outputs + n], pairs, row)
        totals = _add_up(builder, [builder.load(total) for total in sums])
        places = [n % outputs for n in range(LANES)]
        scales = load(builder, scale, ir.VectorType(I16, outputs))
        scales = builder.shuffle_vector(scales, scales, ir.Constant(INTS, places))
        bits = rounded(builder, builder.fmul(totals, widened(builder, scales)))
        for m, row in enumerate(which):
            mine = ir.Constant(
                ir.VectorType(I32, outputs), [m * outputs + n for n in range(outputs)]
            )
            part = builder.shuffle_vector(bits, bits, mine)
            store(builder, part, at(builder, out, builder.mul(row, wide), 2), 2)
        return context.get_dummy_value()

    return tile


def _add_up(builder: Any, vectors: list[Any]) -> Any:
    """The sum of each vector, in a lane of its own, in their order: a power of two of them."""
    even = ir.Constant(INTS, [2 * lane for lane in range(LANES)])
    odd = ir.Constant(INTS, [2 * lane + 1 for lane in range(LANES)])
    for _ in range(LANES.bit_length() - 1):
        pairs = zip(vectors[::2], vectors[1::2] or vectors, strict=True)
        vectors = [
            builder.fadd(builder.shuffle_vector(a, b, even), builder.shuffle_vector(a, b, odd))
            for a, b in pairs
        ]
    return vectors[0]


_tile_1 = _tile(1, 4)
_tile_2 = _tile(2, 4)
_tile_4 = _tile(4, 4)
_tile_8 = _tile(8, 2)


def _products(address: Any) -> None:
    a = i64_at(address)
    x, weight, scale, out, rows, outputs, inputs = a[2], a[3], a[4], a[5], a[6], a[7], a[8]
    width = 2 if rows > 4 else 4
    item = next_item(address)
    while item >= 0:
        for tile in range(item * ITEM, min((item + 1) * ITEM, outputs), width):
            n = min(tile, outputs - width)
            w, s = weight + n * inputs, scale + 2 * n
            for m in range(0, rows, 8):
                left = rows - m
                xm, to = x + 2 * m * inputs, out + 2 * (m * outputs + n)
                if rows > 4:
                    _tile_8(xm, w, s, to, left, outputs, inputs)
                elif rows > 2:
                    _tile_4(xm, w, s, to, left, outputs, inputs)
                elif rows > 1:
                    _tile_2(xm, w, s, to, left, outputs, inputs)
                else:
                    _tile_1(xm, w, s, to, left, outputs, inputs)
        item = next_item(address)

"""Products of few bfloat16 rows with int8 weights, on CPUs with AVX-512 BF16.

Such a product should take as long as reading the weight. Torch's own (`_weight_int8pack_mm`) takes
twice as long on one core, and with more rows is slower than bfloat16 weights (`bench/LOG.md`): it
multiplies in float32, and the hardware prefetcher fails where rows of the weight are read in
parallel.

A tile is the product of `rows` rows of x with `outputs` rows of the weight, in steps of 32
elements. Weights are converted to bfloat16, which represents every int8 exactly, and VDPBF16PS adds
the products of pairs in float32.
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
    available,
    clamped_rows,
    dpbf16,
    inline_asm,
    load,
    numba_ir,
    offset,
    prefetch,
    round_to_bf16,
    store,
    widen_bf16,
)
from kvcache.kernels.jit import ParallelKernel, i64_at, next_item

__all__ = ["kernel", "product", "supports"]

STEP = 32  # elements of a row per step
AHEAD = 6  # how many tiles in advance weights are prefetched
ITEM = 64  # outputs of a work item

BYTES = ir.VectorType(I8, LANES)


def supports(outputs: int, inputs: int) -> bool:
    """Return whether the processor has AVX-512 BF16 and the weight `[outputs, inputs]` is made of
    whole tiles."""
    return available() and outputs >= 4 and inputs % STEP == 0


def product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return x · weightᵀ · scale, `[rows, out]`.

    `x` is `[rows, in]` bfloat16, `weight` `[out, in]` int8, `scale` `[out]` bfloat16.
    """
    x = x.contiguous()
    rows, (outputs, inputs) = len(x), weight.shape
    out = x.new_empty((rows, outputs))
    kernel().run_parallel(
        -(-outputs // ITEM), x.data_ptr(), weight.data_ptr(), scale.data_ptr(), out.data_ptr(),
        rows, outputs, inputs,
    )  # fmt: skip
    return out


@cache
def kernel() -> ParallelKernel:
    """Compile the kernel, which takes seconds the first time.

    Call this only where `supports` holds: without AVX-512 BF16, LLVM aborts the process.
    """
    return ParallelKernel(_product)


def _tile(rows: int, outputs: int) -> Any:
    """Return a numba function that computes `rows` rows of `outputs` outputs.

    It takes the addresses of the first element of x, weight, scale and out; the number of rows of x
    that are left, at least one; the row stride of out; and the row length of x and weight, both in
    elements.
    """

    @intrinsic
    def tile(
        typing: Any, x: Any, w: Any, scale: Any, out: Any, left: Any, wide: Any, k: Any
    ) -> Any:
        return types.void(*[types.int64] * 7), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, weight, scale, out, left, wide, length = arguments
        # With fewer rows left than the tile has, the last one is computed repeatedly.
        row_indices = clamped_rows(builder, rows, left)
        x_rows = [offset(builder, x, builder.mul(row, length), 2) for row in row_indices]
        weights = [offset(builder, weight, builder.mul(I64(n), length), 1) for n in range(outputs)]
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
                pairs_of.append(inline_asm(builder, "vcvtne2ps2bf16 $1, $2, $0", INTS, low, high))
            for m, begin in enumerate(x_rows):
                row = load(builder, offset(builder, begin, here, 2), INTS)
                for n, pairs in enumerate(pairs_of):
                    dpbf16(builder, sums[m * outputs + n], pairs, row)
        totals = _horizontal_sums(builder, [builder.load(total) for total in sums])
        places = [n % outputs for n in range(LANES)]
        scales = load(builder, scale, ir.VectorType(I16, outputs))
        scales = builder.shuffle_vector(scales, scales, ir.Constant(INTS, places))
        bits = round_to_bf16(builder, builder.fmul(totals, widen_bf16(builder, scales)))
        for m, row in enumerate(row_indices):
            lanes = ir.Constant(
                ir.VectorType(I32, outputs), [m * outputs + n for n in range(outputs)]
            )
            row_bits = builder.shuffle_vector(bits, bits, lanes)
            store(builder, row_bits, offset(builder, out, builder.mul(row, wide), 2), 2)
        return context.get_dummy_value()

    return tile


def _horizontal_sums(builder: Any, vectors: list[Any]) -> Any:
    """Return one vector whose lane n is the sum of `vectors[n]`; their number is a power of two."""
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


def _product(address: Any) -> None:
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

"""float32 vector operations whose bits depend on nothing but their operands, as LLVM IR.

Numba orders and contracts sums as it likes, loop by loop. Here each product, sum and rounding is
spelled out: vectors of `LANES` numbers whatever the processor has, fused multiplications where they
are written, and none elsewhere. So a row has the same bits however many rows are computed with it.

Numba's `fastmath` would give leave to reorder these operations too: kernels that use them are
compiled without it (`ParallelKernel` with `exact`).
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvcache.kernels.avx512_bf16 import I32, I64, has_feature, load, numba_ir, store
from kvcache.kernels.avx512_bf16 import prefetch as prefetch_line
from kvcache.kernels.jit import exact_jit

__all__ = [
    "ROWS",
    "WIDTH",
    "available",
    "copy",
    "exp",
    "multiply",
    "prefetch",
    "softmax",
    "transpose",
]

LANES = 8
WIDTH = 16  # columns of a tile
ROWS = (
    6  # of a tile, at most: 6 · 2 sums, 2 vectors of columns and an element take 15 of 16 registers
)
KEYS = 128  # scores of a row of `softmax`
LOWEST = -3.4028234663852886e38  # of float32

FLOAT = ir.FloatType()
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(I32, LANES)


def available() -> bool:
    """Return whether this processor multiplies and adds in one operation."""
    return platform.machine().lower() in ("arm64", "aarch64") or has_feature("fma")


def _call(builder: Any, name: str, *arguments: Any) -> Any:
    """Call an operation of LLVM on vectors or numbers of float32."""
    kind = arguments[0].type
    suffix = f"v{LANES}f32" if kind == FLOATS else "f32"
    function = ir.FunctionType(kind, [kind] * len(arguments))
    named = numba_ir.get_or_insert_function(builder.module, function, f"llvm.{name}.{suffix}")
    return builder.call(named, arguments)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, "fma", a, b, c)


def _all(kind: Any, number: float) -> Any:
    """Return a constant: the number, or a vector that has it in all lanes."""
    return ir.Constant(kind, [number] * LANES if kind == FLOATS else number)


def _all_ints(kind: Any, number: int) -> Any:
    return ir.Constant(kind, [number] * LANES if kind == INTS else number)


def _splat(builder: Any, value: Any) -> Any:
    """Return a vector with a number in all lanes."""
    first = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(INTS, [0] * LANES))


def _shuffled(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(INTS, lanes))


def _exp(builder: Any, x: Any) -> Any:
    """Return e^x for x ≤ 0; 0 below e^-87, and NaN for NaN.

    2^i · 2^f with i + f = x·log₂e and |f| ≤ 1/2: 2^i from its exponent bits, 2^f by a polynomial.
    e^0 is 1. The relative error is below 3e-7.
    """
    kind, integers = x.type, INTS if x.type == FLOATS else I32
    log2e, rest = 1.44269502162933349609375, 1.925963033500011e-08  # a float32, and what it lacks
    low = builder.fcmp_ordered("<", x, _all(kind, -87.0))
    x = builder.select(low, _all(kind, -87.0), x)
    shift = _all(kind, 1.5 * 2**23)  # adding it leaves the rounded integer in the lowest bits
    rounded = _fma(builder, x, _all(kind, log2e), shift)
    whole = builder.fsub(rounded, shift)
    f = _fma(builder, x, _all(kind, log2e), builder.fneg(whole))
    f = _fma(builder, x, _all(kind, rest), f)
    p = _all(kind, 1.535336188319500e-4)
    for coefficient in (
        1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1,
        6.931472028550421e-1, 1.0,
    ):  # fmt: skip
        p = _fma(builder, p, f, _all(kind, coefficient))
    bits = builder.add(builder.bitcast(rounded, integers), _all_ints(integers, 127))
    scale = builder.bitcast(builder.shl(bits, _all_ints(integers, 23)), kind)
    return builder.select(low, _all(kind, 0.0), builder.fmul(p, scale))


def _tile(rows: int) -> Any:
    """Return a numba function (a, a_row, b, c, c_row, depth) that computes c = a · b.

    The arguments are addresses: a of `[rows, depth]`, b of `[depth, WIDTH]`, c of `[rows, WIDTH]`,
    all float32. `a_row` and `c_row` are row strides in bytes. Each sum is over the depth in order.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, a_row, b, c, c_row, depth = arguments
        begins = [builder.add(a, builder.mul(I64(m), a_row)) for m in range(rows)]
        parts = WIDTH // LANES
        zero = ir.Constant(FLOATS, None)
        sums = [numba_ir.alloca_once_value(builder, zero) for _ in range(rows * parts)]
        for total in sums:
            builder.store(zero, total)
        with numba_ir.for_range(builder, depth, intp=I64) as loop:
            step = builder.add(b, builder.mul(loop.index, I64(4 * WIDTH)))
            columns = [
                load(builder, builder.add(step, I64(4 * LANES * n)), FLOATS) for n in range(parts)
            ]
            at = builder.mul(loop.index, I64(4))
            for m, begin in enumerate(begins):
                element = _splat(builder, load(builder, builder.add(begin, at), FLOAT))
                for n, column in enumerate(columns):
                    total = sums[m * parts + n]
                    builder.store(_fma(builder, element, column, builder.load(total)), total)
        for m in range(rows):
            to = builder.add(c, builder.mul(I64(m), c_row))
            for n in range(parts):
                place = builder.add(to, I64(4 * LANES * n))
                store(builder, builder.load(sums[m * parts + n]), place, 4)
        return context.get_dummy_value()

    @intrinsic
    def tile(context: Any, a: Any, a_row: Any, b: Any, c: Any, c_row: Any, depth: Any) -> Any:
        return types.void(*[types.int64] * 6), generate

    return tile


_tile_1, _tile_2, _tile_3, _tile_4, _tile_5, _tile_6 = (_tile(n + 1) for n in range(ROWS))


@exact_jit
def multiply(a: Any, a_row: Any, b: Any, c: Any, c_row: Any, rows: Any, depth: Any) -> None:
    """Compute c = a · b for `rows` rows; see `_tile`."""
    row = 0
    while rows - row >= 6:
        _tile_6(a + row * a_row, a_row, b, c + row * c_row, c_row, depth)
        row += 6
    left = rows - row
    a, c = a + row * a_row, c + row * c_row
    if left == 1:
        _tile_1(a, a_row, b, c, c_row, depth)
    elif left == 2:
        _tile_2(a, a_row, b, c, c_row, depth)
    elif left == 3:
        _tile_3(a, a_row, b, c, c_row, depth)
    elif left == 4:
        _tile_4(a, a_row, b, c, c_row, depth)
    elif left == 5:
        _tile_5(a, a_row, b, c, c_row, depth)


def _halves(builder: Any, value: Any, merge: Callable[[Any, Any], Any]) -> Any:
    """Merge all lanes of a vector, halves first."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        order = [*range(lanes, 2 * lanes), *[0] * (LANES - lanes)]
        value = merge(value, _shuffled(builder, value, value, order))
    return builder.extract_element(value, I32(0))


def _emit_softmax(builder: Any, at: Any, top_at: Any, total_at: Any) -> None:
    places = [builder.add(at, I64(4 * LANES * n)) for n in range(KEYS // LANES)]

    def larger(a: Any, b: Any) -> Any:
        return _call(builder, "maxnum", a, b)

    top = load(builder, places[0], FLOATS)
    for place in places[1:]:
        top = larger(top, load(builder, place, FLOATS))
    highest = _halves(builder, top, larger)
    peak = _splat(builder, highest)
    total = ir.Constant(FLOATS, None)
    for place in places:
        weight = _exp(builder, builder.fsub(load(builder, place, FLOATS), peak))
        store(builder, weight, place, 4)
        total = builder.fadd(total, weight)
    store(builder, highest, top_at, 4)
    store(builder, _halves(builder, total, builder.fadd), total_at, 4)


def _emit_transpose(builder: Any, rows_at: Any, first: Any, to: Any) -> None:
    rows = []
    for n in range(LANES):
        address = load(builder, builder.add(rows_at, I64(8 * n)), I64)
        rows.append(load(builder, builder.add(address, first), FLOATS))
    # Three rounds, of neighbours at a distance of 1, 2 and 4, each exchange one bit of the
    # number of the row with the same bit of the number of the column.
    distance = 1
    while distance < LANES:
        low = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
        high = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
        for n in range(LANES):
            if not n & distance:
                a, b = rows[n], rows[n + distance]
                rows[n] = _shuffled(builder, a, b, low)
                rows[n + distance] = _shuffled(builder, a, b, high)
        distance *= 2
    for n, row in enumerate(rows):
        store(builder, row, builder.add(to, I64(4 * WIDTH * n)), 4)


def _emit_copy(builder: Any, source: Any, to: Any) -> None:
    for n in range(WIDTH // LANES):
        at = I64(4 * LANES * n)
        store(builder, load(builder, builder.add(source, at), FLOATS), builder.add(to, at), 4)


def _on_one_address(emit: Callable[..., None]) -> Any:
    """Return a numba function of an address, whose code `emit` writes."""

    @intrinsic
    def operation(context: Any, a: Any) -> Any:
        return types.void(types.int64), _code(emit)

    return operation


def _on_two_addresses(emit: Callable[..., None]) -> Any:
    @intrinsic
    def operation(context: Any, a: Any, b: Any) -> Any:
        return types.void(types.int64, types.int64), _code(emit)

    return operation


def _on_three_addresses(emit: Callable[..., None]) -> Any:
    @intrinsic
    def operation(context: Any, a: Any, b: Any, c: Any) -> Any:
        return types.void(types.int64, types.int64, types.int64), _code(emit)

    return operation


def _code(emit: Callable[..., None]) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit(builder, *arguments)
        return context.get_dummy_value()

    return generate


# Replace the `KEYS` scores at an address by e^(score − top); store the top and the sum at the
# other two.
softmax = _on_three_addresses(_emit_softmax)
# Store `LANES` numbers of each of `LANES` rows as columns, `WIDTH` numbers apart. The first address
# is that of the rows' addresses, the second the offset of the first number in bytes.
transpose = _on_three_addresses(_emit_transpose)
# Copy `WIDTH` numbers from one address to another.
copy = _on_two_addresses(_emit_copy)
# Load the cache line of an address, which may be invalid, before it is needed.
prefetch = _on_one_address(prefetch_line)


def _scalar_exp() -> Any:
    @intrinsic
    def scalar(context: Any, x: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return _exp(builder, arguments[0])

        return types.float32(types.float32), generate

    return scalar


# e^x for x ≤ 0, with the bits of `softmax`.
exp = _scalar_exp()

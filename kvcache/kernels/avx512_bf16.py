"""AVX-512 BF16 vector operations for kernels, as LLVM IR that numba cannot express.

LLVM renames the intrinsics of these instructions between versions, so they are inline assembly.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils

__all__ = [
    "FLOATS",
    "I8",
    "I16",
    "I32",
    "I64",
    "INTS",
    "LANES",
    "available",
    "broadcast",
    "clamped_rows",
    "dpbf16",
    "has_feature",
    "inline_asm",
    "load",
    "numba_ir",
    "offset",
    "prefetch",
    "round_to_bf16",
    "splat",
    "store",
    "widen_bf16",
]

numba_ir: Any = cgutils  # numba has no type annotations

LANES = 16
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
INTS, FLOATS = ir.VectorType(I32, LANES), ir.VectorType(ir.FloatType(), LANES)


def available() -> bool:
    """Return whether this processor has the AVX-512 BF16 instructions."""
    return has_feature("avx512bf16")


@cache
def has_feature(feature: str) -> bool:
    """Return whether this processor has a feature, by LLVM's name for it."""
    return bool(binding.get_host_cpu_features().get(feature))


def offset(builder: Any, address: Any, count: Any, size: int) -> Any:
    """Return `address` + `count` · `size` bytes."""
    return builder.add(address, builder.mul(count, I64(size)))


def load(builder: Any, address: Any, kind: Any) -> Any:
    """Load a value of type `kind` from an address without alignment."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def prefetch(builder: Any, address: Any) -> None:
    """Prefetch an address into the first-level cache. The address may be invalid."""
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = numba_ir.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    # For reading (0), highest locality (3), data cache (1).
    builder.call(function, [builder.inttoptr(address, I8.as_pointer()), I32(0), I32(3), I32(1)])


def splat(number: int) -> Any:
    """Return a vector of int32 with a constant in all lanes."""
    return ir.Constant(INTS, [number] * LANES)


def broadcast(builder: Any, value: Any) -> Any:
    """Return a vector of int32 with a runtime value in all lanes."""
    first = builder.insert_element(ir.Constant(INTS, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(INTS, [0] * LANES))


def widen_bf16(builder: Any, bits: Any) -> Any:
    """Convert a vector of bfloat16, given as bits, to float32."""
    return builder.bitcast(builder.shl(builder.zext(bits, INTS), splat(16)), FLOATS)


def round_to_bf16(builder: Any, value: Any) -> Any:
    """Round a vector of float32 to the nearest bfloat16, ties to even; return the bits."""
    bits = builder.bitcast(value, INTS)
    odd = builder.and_(builder.lshr(bits, splat(16)), splat(1))
    raised = builder.add(bits, builder.add(odd, splat(0x7FFF)))
    return builder.trunc(builder.lshr(raised, splat(16)), ir.VectorType(I16, LANES))


def dpbf16(builder: Any, total: Any, a: Any, b: Any) -> None:
    """Add a₀b₀ + a₁b₁ of each lane's bfloat16 pairs to the lane of variable `total` (VDPBF16PS)."""
    code = "vdpbf16ps $2, $1, $0"
    builder.store(inline_asm(builder, code, FLOATS, a, b, to=builder.load(total)), total)


def clamped_rows(builder: Any, count: int, available_rows: Any) -> list[Any]:
    """Return `min(row, available_rows - 1)` for each `row` of `range(count)`."""
    last = builder.sub(available_rows, I64(1))
    return [
        builder.select(builder.icmp_signed(">", I64(row), last), last, I64(row))
        for row in range(count)
    ]


def store(builder: Any, value: Any, address: Any, align: int) -> None:
    """Store a vector at an address with the given alignment in bytes."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def inline_asm(builder: Any, code: str, kind: Any, a: Any, b: Any, to: Any = None) -> Any:
    """Emit one instruction with operands `a`, `b` and optionally the accumulator `to`.

    Returns a value of type `kind`.
    """
    operands = [a, b] if to is None else [a, b, to]
    constraints = "=v,v,v" if to is None else "=v,v,v,0"
    function = ir.FunctionType(kind, [value.type for value in operands])
    return builder.asm(function, code, constraints, operands, False)


binding.initialize_native_asmparser()

"""AVX-512 BF16 for kernels: what numba cannot say, in LLVM's terms.

LLVM has other names for these instructions in each version, so they are given as what an assembler
reads.
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
    "add_pairs",
    "assembled",
    "at",
    "available",
    "clamped",
    "everywhere",
    "has",
    "load",
    "numba_ir",
    "prefetch",
    "rounded",
    "same",
    "store",
    "widened",
]

numba_ir: Any = cgutils  # it has no types

LANES = 16
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
INTS, FLOATS = ir.VectorType(I32, LANES), ir.VectorType(ir.FloatType(), LANES)


def available() -> bool:
    """Whether this processor has the instructions."""
    return has("avx512bf16")


@cache
def has(feature: str) -> bool:
    """Whether this processor has what LLVM calls so."""
    return bool(binding.get_host_cpu_features().get(feature))


def at(builder: Any, address: Any, count: Any, size: int) -> Any:
    """The address `count` numbers of `size` bytes further."""
    return builder.add(address, builder.mul(count, I64(size)))


def load(builder: Any, address: Any, kind: Any) -> Any:
    """What is at an address, aligned or not."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def prefetch(builder: Any, address: Any) -> None:
    """Have what is there fetched into the nearest cache; it may be anywhere."""
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = numba_ir.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    # To be read, into the nearest cache; data.
    builder.call(function, [builder.inttoptr(address, I8.as_pointer()), I32(0), I32(3), I32(1)])


def same(number: int) -> Any:
    """A constant in all lanes."""
    return ir.Constant(INTS, [number] * LANES)


def everywhere(builder: Any, value: Any) -> Any:
    """A number in all lanes."""
    one = builder.insert_element(ir.Constant(INTS, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(INTS, [0] * LANES))


def widened(builder: Any, bits: Any) -> Any:
    """Bfloat16s, given as their bits, in float32."""
    return builder.bitcast(builder.shl(builder.zext(bits, INTS), same(16)), FLOATS)


def rounded(builder: Any, value: Any) -> Any:
    """The bits of the nearest bfloat16s, ties to even, of numbers in float32."""
    bits = builder.bitcast(value, INTS)
    odd = builder.and_(builder.lshr(bits, same(16)), same(1))
    raised = builder.add(bits, builder.add(odd, same(0x7FFF)))
    return builder.trunc(builder.lshr(raised, same(16)), ir.VectorType(I16, LANES))


def add_pairs(builder: Any, total: Any, a: Any, b: Any) -> None:
    """To the sums in variable `total`, in each lane, a₀b₀ + a₁b₁ of the lane's pairs."""
    code = "vdpbf16ps $2, $1, $0"
    builder.store(assembled(builder, code, FLOATS, a, b, to=builder.load(total)), total)


def clamped(builder: Any, count: int, there: Any) -> list[Any]:
    """Numbers 0 to `count` of rows of which so many are there: of those beyond, the last one."""
    last = builder.sub(there, I64(1))
    return [
        builder.select(builder.icmp_signed(">", I64(row), last), last, I64(row))
        for row in range(count)
    ]


def store(builder: Any, value: Any, address: Any, align: int) -> None:
    """Write a vector."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def assembled(builder: Any, code: str, kind: Any, a: Any, b: Any, to: Any = None) -> Any:
    """What an instruction makes of two vectors, and of what its result is added to."""
    given = [a, b] if to is None else [a, b, to]
    constraints = "=v,v,v" if to is None else "=v,v,v,0"
    function = ir.FunctionType(kind, [value.type for value in given])
    return builder.asm(function, code, constraints, given, False)


binding.initialize_native_asmparser()

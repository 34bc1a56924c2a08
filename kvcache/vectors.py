"""AVX-512 BF16 for kernels: what numba cannot say, in LLVM's terms.

LLVM has other names for these instructions in each version, so they are given as what an assembler
reads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils

__all__ = ["FLOATS", "I32", "I64", "INTS", "LANES", "assembled", "available", "load", "numba_ir"]

numba_ir: Any = cgutils  # it has no types

LANES = 16
I32, I64 = ir.IntType(32), ir.IntType(64)
INTS, FLOATS = ir.VectorType(I32, LANES), ir.VectorType(ir.FloatType(), LANES)


@cache
def available() -> bool:
    """Whether this processor has the instructions."""
    return bool(binding.get_host_cpu_features().get("avx512bf16"))


def load(builder: Any, address: Any, kind: Any) -> Any:
    """What is at an address, aligned or not."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def assembled(builder: Any, code: str, kind: Any, a: Any, b: Any, to: Any = None) -> Any:
    """What an instruction makes of two vectors, and of what its result is added to."""
    given = [a, b] if to is None else [a, b, to]
    constraints = "=v,v,v" if to is None else "=v,v,v,0"
    function = ir.FunctionType(kind, [value.type for value in given])
    return builder.asm(function, code, constraints, given, False)


binding.initialize_native_asmparser()

"""What numba needs to work on torch's memory in place, bfloat16 among it.

Kernels take addresses, not arrays: a call costs a microsecond then, whatever it is given. They
trust their callers with sizes, as torch's own do. Import this where its kernels are wanted only:
numba takes half a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = [
    "bf16",
    "exp",
    "f32_at",
    "i32_at",
    "i64_at",
    "inlined",
    "native",
    "parallel",
    "to_bf16",
    "u16_at",
]

F = TypeVar("F", bound=Callable[..., Any])


def native(function: F) -> F:
    """Compile `function`. Sums may be reordered, so that they are vectors; nothing is checked."""
    return cast(F, numba.njit(nogil=True, cache=True, fastmath=True, error_model="numpy")(function))


def inlined(function: F) -> F:
    """Have it compiled into each caller: loops over what a caller knows are of that length then,
    and become vectors without ends."""
    return cast(F, numba.njit(inline="always")(function))


def parallel(function: F) -> F:
    """The same, and its `numba.prange` loops are shared among threads."""
    options = numba.njit(nogil=True, cache=True, fastmath=True, error_model="numpy", parallel=True)
    return cast(F, options(function))


def _pointer(kind: Any) -> Any:
    pointer: Any = types.CPointer

    @intrinsic
    def at(typing_context: Any, address: Any) -> Any:
        signature = pointer(kind)(types.int64)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return signature, generate

    return at


# An address as a pointer, to be indexed.
u16_at = _pointer(types.uint16)
f32_at = _pointer(types.float32)
i32_at = _pointer(types.int32)
i64_at = _pointer(types.int64)


def _cast(kind: Any, to: Any, ir_type: Any) -> Any:
    @intrinsic
    def same_bits(typing_context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], ir_type)

        return to(kind), generate

    return same_bits


_as_float = _cast(types.uint32, types.float32, ir.FloatType())
_as_bits = _cast(types.float32, types.uint32, ir.IntType(32))


@native
def bf16(bits: Any) -> Any:
    """A bfloat16, as it lies in memory, in float32."""
    return _as_float(numba.uint32(bits) << numba.uint32(16))


@native
def to_bf16(value: Any) -> Any:
    """The nearest bfloat16, ties to even, of a float32 that is a number."""
    bits = _as_bits(numba.float32(value))
    odd = (bits >> numba.uint32(16)) & numba.uint32(1)
    return numba.uint16((bits + numba.uint32(0x7FFF) + odd) >> numba.uint32(16))


# Not `native`: the order of the additions is what rounds.
@numba.njit(nogil=True, cache=True, fastmath={"nnan", "ninf", "nsz", "contract"})
def exp(x: Any) -> Any:
    """e^x for x ≤ 0, error 1e-6; 0 below e^-88. A loop over it is made of vectors.

    2^i · 2^f with |f| ≤ 1/2: the first by its bits, the second as a polynomial.
    """
    t = x * np.float32(1.44269504)
    t = np.float32(-127.0) if t < np.float32(-127.0) else t
    shift = np.float32(1.5 * 2**23)  # added, it leaves an integer in the last bits
    rounded = t + shift
    f = t - (rounded - shift)
    p = np.float32(1.5403530e-4)
    p = p * f + np.float32(1.3333558e-3)
    p = p * f + np.float32(9.6181291e-3)
    p = p * f + np.float32(5.5504109e-2)
    p = p * f + np.float32(2.4022651e-1)
    p = p * f + np.float32(6.9314718e-1)
    p = p * f + np.float32(1.0)
    return p * _as_float((_as_bits(rounded) + numba.uint32(127)) << numba.uint32(23))

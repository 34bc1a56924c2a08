"""What numba needs to work on torch's memory in place, bfloat16 among it.

Kernels take addresses, not arrays: a call costs a microsecond then, whatever it is given. They
trust their callers with sizes, as torch's own do. Import this where its kernels are wanted only:
numba takes half a second.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "Shared",
    "bf16",
    "exp",
    "f32",
    "f32_at",
    "f32_bits",
    "forget_stale",
    "i32_at",
    "i64_at",
    "inlined",
    "larger",
    "native",
    "next_item",
    "to_bf16",
    "u16_at",
    "u32_at",
]

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
COMMON = [Path(__file__).with_name(name) for name in ("jit.py", "gemm_tile.py", "avx512_bf16.py")]
QUICK: dict[str, Any] = {"fastmath": True, "error_model": "numpy", "cache": True}


@cache
def forget_stale(file: str) -> None:
    """Drop what numba has kept of a module's kernels from before a change to what is compiled into
    them from elsewhere: it looks whether the module itself has changed, and at nothing else."""
    changed = max(path.stat().st_mtime for path in COMMON)
    for index in (Path(file).parent / "__pycache__").glob(f"{Path(file).stem}.*.nbi"):
        with suppress(OSError):  # another process was first, or they are not ours
            if index.stat().st_mtime < changed:
                index.unlink()


def native(function: F) -> F:
    """Compile `function`. Sums may be reordered, so that they are vectors; nothing is checked."""
    forget_stale(function.__code__.co_filename)
    return cast(F, numba.njit(nogil=True, **QUICK)(function))


def inlined(function: F) -> F:
    """Have it compiled into each caller: loops over what a caller knows are of that length then,
    and become vectors without ends."""
    return cast(F, numba.njit(inline="always")(function))


class Shared:
    """A function of an address, compiled, whose work is in items that threads may share.

    At the address are, as int64: the next item, the number of items, and what else it is given.
    It does items as long as there is a `next_item`. (That it gets no function to call for an item
    is for numba's sake, which keeps on disk only what refers to nothing but globals and numbers.)
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        forget_stale(function.__code__.co_filename)
        work: Any = numba.cfunc(types.void(types.int64), **QUICK)(function)
        self._work = work
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_int64)(work.address)

    def alone(self, count: int, *arguments: int) -> None:
        """Items 0 to `count`, one after the other."""
        block = _block(count, arguments)
        self._alone(ctypes.addressof(block))

    def together(self, count: int, *arguments: int) -> None:
        """By the threads that torch computes with: who is done with an item takes the next."""
        team = _team()
        if team is None:
            return self.alone(count, *arguments)
        block = _block(count, arguments)
        team(self._work.address, ctypes.addressof(block), 0, 0)
        return None


def _block(count: int, arguments: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    """The next item, how many there are, and the arguments."""
    return (ctypes.c_int64 * (2 + len(arguments)))(0, count, *arguments)


@cache
def _team() -> Any:
    """`GOMP_parallel` of the OpenMP library that torch has loaded; None if it has no such library.

    Numba's own threads would be a second team: after each product torch's go on spinning for a
    while, on the cores that the others want (`bench/LOG.md` has what that costs).
    """
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    loaded = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    # Others may have brought theirs.
    for path in sorted(loaded, key=lambda path: ("torch" not in path, path)):
        if Path(path).name.startswith(("libgomp", "libiomp", "libomp")):
            parallel = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
            if parallel is not None:
                parallel.restype = None
                parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_uint] * 2]
                return parallel
    log.warning("torch's threads cannot be found: what lies between its products uses one")
    return None


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
u32_at = _pointer(types.uint32)
i32_at = _pointer(types.int32)
i64_at = _pointer(types.int64)


def _add_one() -> Any:
    @intrinsic
    def claim(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
            return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "monotonic")

        return types.int64(types.int64), generate

    return claim


# The number at an address, which is one more afterwards, for whoever asks next.
_claim = _add_one()


@native
def next_item(address: Any) -> Any:
    """The item to do next, of a `Shared` function; -1 at the end."""
    index = _claim(address)
    return index if index < i64_at(address)[1] else -1


def _cast(kind: Any, to: Any, ir_type: Any) -> Any:
    @intrinsic
    def same_bits(typing_context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], ir_type)

        return to(kind), generate

    return same_bits


_as_float = _cast(types.uint32, types.float32, ir.FloatType())
_as_bits = _cast(types.float32, types.uint32, ir.IntType(32))


def f32_bits(value: float) -> int:
    """A float32 among the integers that a `Shared` is given."""
    return int(np.float32(value).view(np.uint32))


@native
def f32(bits: Any) -> Any:
    """It, again."""
    return _as_float(numba.uint32(bits))


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


def _maximum() -> Any:
    @intrinsic
    def maximum(typing_context: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 2)
            name = "llvm.maxnum.f32"
            function = cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]
            return builder.call(function, arguments, fastmath=["fast"])

        return types.float32(types.float32, types.float32), generate

    return maximum


# The larger of two float32. Loops over Python's `max` are not made vectors of.
larger = _maximum()


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

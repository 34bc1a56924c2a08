"""Numba kernels that work in place on torch's memory, bfloat16 included.

Kernels take addresses instead of arrays, so a call costs a microsecond whatever its arguments. Like
torch's own kernels, they do not check sizes. Import this module lazily, where kernels are needed:
importing numba takes half a second.
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
    "ParallelKernel",
    "bf16_to_f32",
    "drop_stale_cache",
    "exact_jit",
    "exp",
    "f32_at",
    "f32_bits",
    "f32_from_bits",
    "f32_to_bf16",
    "fmax",
    "i32_at",
    "i64_at",
    "inline_jit",
    "jit",
    "next_item",
    "u16_at",
    "u32_at",
]

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
# Modules whose code is compiled into the kernels of others.
COMMON_SOURCES = [
    Path(__file__).with_name(name)
    for name in ("jit.py", "gemm_tile.py", "avx512_bf16.py", "exact_f32.py", "merge_results.py")
]
FAST_OPTIONS: dict[str, Any] = {"fastmath": True, "error_model": "numpy", "cache": True}


@cache
def drop_stale_cache(file: str) -> None:
    """Delete numba's cache index of a module if it is older than the `COMMON_SOURCES`.

    Numba itself only checks whether the module with the kernel has changed, not the modules whose
    code is compiled into the kernel.
    """
    changed = max(path.stat().st_mtime for path in COMMON_SOURCES)
    for index in (Path(file).parent / "__pycache__").glob(f"{Path(file).stem}.*.nbi"):
        with suppress(OSError):  # another process deleted it first, or another user owns it
            if index.stat().st_mtime < changed:
                index.unlink()


def jit(function: F) -> F:
    """Compile `function`. Sums may be reordered, for vectorization; indices are not checked."""
    drop_stale_cache(function.__code__.co_filename)
    return cast(F, numba.njit(nogil=True, **FAST_OPTIONS)(function))


def exact_jit(function: F) -> F:
    """Compile `function`. Sums and products are computed as they are written."""
    drop_stale_cache(function.__code__.co_filename)
    return cast(F, numba.njit(nogil=True, cache=True, error_model="numpy")(function))


def inline_jit(function: F) -> F:
    """Compile `function` inline into each caller.

    Loop bounds that are constants of the caller are then constants of the loop, which vectorizes
    without remainder loops.
    """
    return cast(F, numba.njit(inline="always")(function))


class ParallelKernel:
    """A compiled kernel over numbered work items, which threads claim dynamically.

    `function` takes the address of a block of int64: the next item, the number of items, then the
    arguments. It processes items until `next_item` returns -1. (It contains the loop, rather than
    receiving a function per item, because numba caches on disk only code that refers to globals
    and constants.) With `exact`, sums and products are computed as they are written.
    """

    def __init__(self, function: Callable[[Any], None], *, exact: bool = False) -> None:
        drop_stale_cache(function.__code__.co_filename)
        options = FAST_OPTIONS | ({"fastmath": False} if exact else {})
        compiled: Any = numba.cfunc(types.void(types.int64), **options)(function)
        self._compiled = compiled
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_int64)(compiled.address)

    def run_serial(self, count: int, *arguments: int) -> None:
        """Process items `[0, count)` on the calling thread."""
        block = _argument_block(count, arguments)
        self._call(ctypes.addressof(block))

    def run_parallel(self, count: int, *arguments: int) -> None:
        """Process items `[0, count)` on torch's OpenMP team; threads claim items dynamically."""
        gomp_parallel = _gomp_parallel()
        if gomp_parallel is None:
            return self.run_serial(count, *arguments)
        block = _argument_block(count, arguments)
        gomp_parallel(self._compiled.address, ctypes.addressof(block), 0, 0)
        return None


def _argument_block(count: int, arguments: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    """Return the next item (0), the number of items, and the arguments."""
    return (ctypes.c_int64 * (2 + len(arguments)))(0, count, *arguments)


@cache
def _gomp_parallel() -> Any:
    """Return `GOMP_parallel` of torch's OpenMP library; None if torch has not loaded one.

    Numba's own threads would form a second team. After each matrix product torch's threads keep
    spinning for a while, on the cores that the second team needs (`bench/LOG.md` has the cost).
    """
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    loaded = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    # Other packages may have loaded OpenMP libraries of their own; torch's comes first.
    for path in sorted(loaded, key=lambda path: ("torch" not in path, path)):
        if Path(path).name.startswith(("libgomp", "libiomp", "libomp")):
            parallel = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
            if parallel is not None:
                parallel.restype = None
                parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_uint] * 2]
                return parallel
    log.warning("torch's OpenMP library was not found: kernels outside torch run on one thread")
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


# Convert an address to a typed pointer that kernels can index.
u16_at = _pointer(types.uint16)
f32_at = _pointer(types.float32)
u32_at = _pointer(types.uint32)
i32_at = _pointer(types.int32)
i64_at = _pointer(types.int64)


def _fetch_increment() -> Any:
    @intrinsic
    def fetch_increment(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
            return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "monotonic")

        return types.int64(types.int64), generate

    return fetch_increment


# Atomically increment the int64 at an address; returns its value from before.
_fetch_and_increment = _fetch_increment()


@jit
def next_item(address: Any) -> Any:
    """Claim the next item of a `ParallelKernel`; -1 when none is left."""
    index = _fetch_and_increment(address)
    return index if index < i64_at(address)[1] else -1


def _bitcast(kind: Any, to: Any, ir_type: Any) -> Any:
    @intrinsic
    def bitcast(typing_context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], ir_type)

        return to(kind), generate

    return bitcast


_as_float = _bitcast(types.uint32, types.float32, ir.FloatType())
_as_bits = _bitcast(types.float32, types.uint32, ir.IntType(32))


def f32_bits(value: float) -> int:
    """Return the bits of a float32, as an integer argument for a `ParallelKernel`."""
    return int(np.float32(value).view(np.uint32))


@jit
def f32_from_bits(bits: Any) -> Any:
    """Return the float32 with the bits of `f32_bits`; for kernels."""
    return _as_float(numba.uint32(bits))


@jit
def bf16_to_f32(bits: Any) -> Any:
    """Convert a bfloat16, given as its 16 bits, to float32."""
    return _as_float(numba.uint32(bits) << numba.uint32(16))


@jit
def f32_to_bf16(value: Any) -> Any:
    """Return the bits of the nearest bfloat16, ties to even. NaN is unsupported."""
    bits = _as_bits(numba.float32(value))
    odd = (bits >> numba.uint32(16)) & numba.uint32(1)
    return numba.uint16((bits + numba.uint32(0x7FFF) + odd) >> numba.uint32(16))


def _maximum() -> Any:
    @intrinsic
    def maximum(typing_context: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 2)
            name = "llvm.maxnum.f32"
            module = builder.module
            function = cgutils.get_or_insert_function(module, kind, name)  # type: ignore[no-untyped-call]
            return builder.call(function, arguments, fastmath=["fast"])

        return types.float32(types.float32, types.float32), generate

    return maximum


# The larger of two float32. LLVM does not vectorize loops over Python's `max`.
fmax = _maximum()


# Not `jit`, which may reorder additions: the rounding below relies on their order.
@numba.njit(nogil=True, cache=True, fastmath={"nnan", "ninf", "nsz", "contract"})
def exp(x: Any) -> Any:
    """Return e^x for x ≤ 0 with error 1e-6; 0 below e^-88. Loops over it vectorize.

    Computes 2^i · 2^f with |f| ≤ 1/2: 2^i from its exponent bits, 2^f by a polynomial.
    """
    t = x * np.float32(1.44269504)
    t = np.float32(-127.0) if t < np.float32(-127.0) else t
    shift = np.float32(1.5 * 2**23)  # adding it leaves the rounded integer in the lowest bits
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

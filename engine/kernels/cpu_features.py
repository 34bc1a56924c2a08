"""Features of this machine's processor."""

from __future__ import annotations

from pathlib import Path

__all__ = ["mkl_mode", "multiplies_bf16"]

# Linux's names of the features: x86's, then ARM's.
BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})


CPUINFO = Path("/proc/cpuinfo")


def multiplies_bf16(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether the processor multiplies bfloat16; without that, float32 is faster."""
    return bool(BF16 & _flags(cpuinfo))


def mkl_mode(cpuinfo: Path = CPUINFO) -> str:
    """Return the value of MKL_CBWR with which MKL sums a row in the same order in every product.

    By default MKL chooses kernels by the number of rows and of threads, and on processors with AMX
    the order differs between them. The strict modes of its conditional numerical reproducibility
    use one order. Empty where MKL has no such mode. MKL reads MKL_CBWR before its first product.
    """
    flags = _flags(cpuinfo)
    if "avx512f" in flags:
        return "AVX512,STRICT"
    return "AVX2,STRICT" if "avx2" in flags else ""


def _flags(cpuinfo: Path) -> set[str]:
    """Return the features that Linux names; none if it cannot be asked."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return set()
    lines = [line for line in text.splitlines() if line.startswith(("flags", "Features"))]
    return {flag for line in lines for flag in line.split()}

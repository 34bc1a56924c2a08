"""Features of this machine's processor."""

from __future__ import annotations

from pathlib import Path

__all__ = ["multiplies_bf16"]

# Linux's names of the features: x86's, then ARM's.
BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})


def multiplies_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the processor multiplies bfloat16; without that, float32 is faster."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    flags = [line for line in text.splitlines() if line.startswith(("flags", "Features"))]
    return any(BF16 & set(line.split()) for line in flags)

"""What this machine's processor can do."""

from __future__ import annotations

from pathlib import Path

__all__ = ["multiplies_bf16"]

# x86's names, and ARM's, as Linux has them.
BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})


def multiplies_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether it has instructions for products in bfloat16: without them float32 is faster."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    flags = [line for line in text.splitlines() if line.startswith(("flags", "Features"))]
    return any(BF16 & set(line.split()) for line in flags)

"""Copies many runs of bytes from one memory of a GPU to another, in one kernel of Triton.

Triton comes with torch's builds for CUDA. Import this module lazily: elsewhere it may be missing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

__all__ = ["CopyPlan", "launch", "plan"]

Runs = npt.NDArray[np.int64]  # [runs, 3]: offset in the source, in the target, bytes

WIDEST = 16  # bytes; a thread moves at most so much in one load or store
TILE = 4096  # elements that one program moves
SHORT = 64  # elements; up to this length, a program copies several runs
WARPS = 8
_ELEMENTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Runs as the kernel takes them."""

    pieces: Runs  # offsets and lengths in units of `unit` bytes; no piece is longer than a tile
    unit: int  # a power of 2, which divides all offsets and lengths
    rows: int  # pieces per program

    @property
    def element(self) -> torch.dtype:
        return _ELEMENTS[self.unit]

    @property
    def scale(self) -> int:
        """Elements per unit."""
        return self.unit // self.element.itemsize


def plan(runs: Runs) -> CopyPlan:
    """Choose the width of accesses, and cut long runs so that many programs share one.

    Runs of 16 bytes' alignment are moved in vectors of 16 bytes.
    """
    bits = int(np.bitwise_or.reduce(runs, axis=None)) | WIDEST  # the lowest one is common to all
    unit = bits & -bits
    scale = unit // _ELEMENTS[unit].itemsize
    longest = int(runs[:, 2].max(initial=0)) // unit * scale
    rows = TILE // SHORT if longest <= SHORT else 1
    return CopyPlan(_cut(runs // unit, TILE // scale), unit, rows)


def launch(
    source: torch.Tensor, target: torch.Tensor, pieces: torch.Tensor, planned: CopyPlan
) -> None:
    """Start a copy on the current stream.

    `source` and `target` are `[bytes]`, uint8, in multiples of `WIDEST` and aligned to it. `pieces`
    is `planned.pieces` on their device. Nothing checks that the pieces are within them.
    """
    if not len(planned.pieces):
        return
    programs = -(-len(planned.pieces) // planned.rows)
    _copy[(programs,)](
        source.view(planned.element),
        target.view(planned.element),
        pieces,
        len(planned.pieces),
        SCALE=planned.scale,
        ROWS=planned.rows,
        WIDTH=TILE // planned.rows,
        num_warps=WARPS,
    )


def _cut(runs: Runs, most: int) -> Runs:
    """Cut runs into pieces of at most `most`; runs without length have none."""
    counts = -(-runs[:, 2] // most)
    if (counts == 1).all():
        return runs
    pieces = np.repeat(runs, counts, axis=0)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    skipped = (np.arange(len(pieces)) - first) * most
    pieces[:, :2] += skipped[:, np.newaxis]
    pieces[:, 2] = np.minimum(pieces[:, 2] - skipped, most)
    return pieces


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _copy(  # type: ignore[no-untyped-def]  # Triton looks for the types in its own names
    source,
    target,
    pieces,
    count,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < count
    # The compiler sees that these are multiples of `SCALE`, and vectorizes the accesses.
    begin = tl.load(pieces + row * 3, mask=there, other=0) * SCALE
    to = tl.load(pieces + row * 3 + 1, mask=there, other=0) * SCALE
    length = tl.load(pieces + row * 3 + 2, mask=there, other=0) * SCALE
    element = tl.arange(0, WIDTH)[None, :]
    inside = element < length[:, None]
    data = tl.load(source + (begin[:, None] + element), mask=inside)
    tl.store(target + (to[:, None] + element), data, mask=inside)

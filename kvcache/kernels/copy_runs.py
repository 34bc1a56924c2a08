"""Copies many runs of bytes from one memory of a GPU to another, in one kernel of Triton.

Triton comes with torch's builds for CUDA. Import this module lazily: elsewhere it may be missing.
"""

from __future__ import annotations

from typing import NamedTuple

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
LEAST_CUT, MOST_CUT = 32 << 10, 2 << 20  # bytes of the pieces of runs that are cut
_ELEMENTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class CopyPlan(NamedTuple):
    """Runs as the kernel takes them, and how it goes through them."""

    runs: Runs  # none of them is much longer than the others
    unit: int  # bytes; a power of 2, which divides all offsets and lengths
    rows: int  # runs per program
    tiles: int  # programs for each group of `rows` runs, behind one another

    @property
    def element(self) -> torch.dtype:
        return _ELEMENTS[self.unit]


def plan(runs: Runs) -> CopyPlan:
    """Choose the width of accesses and the programs for `runs`, `[runs, 3]`.

    Runs of 16 bytes' alignment are moved in vectors of 16 bytes. Each run has as many programs as
    the longest one, so runs that are much longer than most are cut.
    """
    bits = int(np.bitwise_or.reduce(runs, axis=None)) | WIDEST  # the lowest one is common to all
    unit = bits & -bits
    size = _ELEMENTS[unit].itemsize
    lengths = runs[:, 2]
    longest = int(lengths.max(initial=0))
    most = max(LEAST_CUT, min(MOST_CUT, 4 * (int(lengths.sum()) // max(len(runs), 1))))
    if longest > most:
        runs, longest = _cut(runs, most // WIDEST * WIDEST), most
    rows = TILE // SHORT if longest <= SHORT * size else 1
    return CopyPlan(runs, unit, rows, max(1, -(-longest * rows // (TILE * size))))


def launch(
    source: torch.Tensor, target: torch.Tensor, runs: torch.Tensor, planned: CopyPlan
) -> None:
    """Start a copy on the current stream.

    `source` and `target` are `[bytes]`, uint8, in multiples of `WIDEST` and aligned to it. `runs`
    are `planned.runs` on their device. Nothing checks that they are within the memory.
    """
    if not len(runs):
        return
    _copy[(-(-len(runs) // planned.rows), planned.tiles)](
        source.view(planned.element),
        target.view(planned.element),
        runs,
        len(runs),
        UNIT=planned.unit,
        SCALE=planned.unit // planned.element.itemsize,
        ROWS=planned.rows,
        WIDTH=TILE // planned.rows,
        num_warps=WARPS,
    )


def _cut(runs: Runs, most: int) -> Runs:
    """Cut runs into pieces of at most `most` bytes; runs without length have none."""
    counts = -(-runs[:, 2] // most)
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
    runs,
    count,
    UNIT: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < count
    # The compiler sees that these are multiples of `SCALE`, and vectorizes the accesses.
    begin = tl.load(runs + row * 3, mask=there, other=0) // UNIT * SCALE
    to = tl.load(runs + row * 3 + 1, mask=there, other=0) // UNIT * SCALE
    length = tl.load(runs + row * 3 + 2, mask=there, other=0) // UNIT * SCALE
    element = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    inside = element < length[:, None]
    data = tl.load(source + (begin[:, None] + element), mask=inside)
    tl.store(target + (to[:, None] + element), data, mask=inside)

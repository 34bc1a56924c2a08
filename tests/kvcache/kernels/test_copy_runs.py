"""The kernel that copies runs, where Triton is: on a GPU, or interpreted (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed (extra cuda)")
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
if DEVICE == "cuda" and not torch.cuda.is_available():
    pytest.skip("needs a GPU of NVIDIA, or TRITON_INTERPRET=1", allow_module_level=True)

from kvcache.kernels import copy_runs  # noqa: E402

pytestmark = [pytest.mark.cuda] if DEVICE == "cuda" else []

SIZE = 1 << 20


@pytest.mark.parametrize("count", [1, 63, 64, 65, 300])
@pytest.mark.parametrize(
    ("unit", "lengths"),
    [
        (16, [64]),
        (16, [512]),
        (16, [528]),
        (16, [0, 16, 100_000]),
        (16, [32768, 32784]),
        (8, [8, 40]),
        (4, [4, 36_000]),
        (2, [2, 100]),
        (1, [1, 3, 5001]),
    ],
)
def test_runs_are_copied_and_nothing_else(unit: int, lengths: list[int], count: int):
    random = np.random.default_rng(count)
    sizes = np.resize(lengths, min(count, max(1, SIZE // 2 // max(lengths))))
    ends = np.cumsum(sizes + random.integers(0, 3, len(sizes)) * unit)
    begins = random.integers(0, (SIZE - max(lengths)) // unit, len(sizes)) * unit
    runs = np.stack((begins, ends - sizes, sizes), axis=1).astype(np.int64)
    source = torch.from_numpy(random.integers(0, 256, SIZE).astype(np.uint8))
    wanted = torch.zeros_like(source)
    for begin, to, size in runs.tolist():
        wanted[to : to + size] = source[begin : begin + size]

    planned = copy_runs.plan(runs)
    assert planned.unit >= unit
    target = torch.zeros_like(source, device=DEVICE)
    there = torch.from_numpy(np.ascontiguousarray(planned.runs)).to(DEVICE)
    copy_runs.launch(source.to(DEVICE), target, there, planned)
    assert torch.equal(target.cpu(), wanted)


def test_long_runs_have_several_programs_and_short_ones_share_one():
    assert copy_runs.plan(np.array([[0, 32, 1 << 20]]))[1:] == (16, 1, 32)
    assert copy_runs.plan(np.array([[0, 64, 64]] * 100))[1:] == (16, 64, 1)
    assert copy_runs.plan(np.array([[0, 8, 64]] * 100)).unit == 8
    nothing = copy_runs.plan(np.zeros((1, 3), dtype=np.int64))
    copy_runs.launch(torch.zeros(16), torch.zeros(16), torch.zeros(0), nothing)


def test_runs_much_longer_than_others_are_cut():
    """Or each of the others had as many programs: three million for a prompt of 600 MiB."""
    page, size = 16 << 10, 600 << 20
    edges = [[n * page, (n + 8) * page, page] for n in range(64)]
    planned = copy_runs.plan(np.array([*edges, [1 << 30, 1 << 30, size]]))
    assert len(planned.runs) == 64 + size // (2 << 20)
    assert planned.runs[:, 2].sum() == 64 * page + size
    assert len(planned.runs) * planned.tiles < 30_000
    short = copy_runs.plan(
        np.array([[n * 64, n * 64, 64] for n in range(10_000)] + [[0, 0, 2 << 20]])
    )
    assert len(short.runs) * short.tiles < 20_000

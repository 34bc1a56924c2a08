"""The kernel that writes keys and values into pages on a GPU."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (3, 128), (8, 128)])
def test_rows_go_where_they_belong_and_padding_nowhere(dtype: torch.dtype, heads: int, dim: int):
    from kvcache.kernels.append_rows import append_rows

    size, layers = 16, 3
    pool = torch.zeros((9, layers, 2, size, heads, dim), dtype=dtype, device="cuda").transpose(0, 1)
    rows = torch.randn((5, 3 * heads, dim), device="cuda").to(dtype)
    k, v = rows[:, :heads], rows[:, heads : 2 * heads]  # strided, as slices of a projection
    slots = [(5, 3), None, (2, 0), (8, 15), None]
    places = [-1 if slot is None else slot[0] * size + slot[1] for slot in slots]
    append_rows(pool[1], k, v, torch.tensor(places, device="cuda"))
    wanted = torch.zeros_like(pool)
    for row, slot in enumerate(slots):
        if slot is not None:
            wanted[1, slot[0], 0, slot[1]], wanted[1, slot[0], 1, slot[1]] = k[row], v[row]
    assert torch.equal(pool, wanted)

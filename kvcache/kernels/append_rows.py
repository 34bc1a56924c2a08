"""Keys and values of rows into the pages of one layer on a GPU, as one kernel of Triton.

Unlike torch's indexed assignment, it skips padding rows and reads the places of the others from
memory, so a CUDA graph that holds it can be replayed with other places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["append_rows"]


def append_rows(
    pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: torch.Tensor
) -> None:
    """Write the rows of `k` and `v`, `[rows, kv_heads, head_dim]`, into `pages`.

    `pages` is one layer of the pool, `[pages, 2, page_size, kv_heads, head_dim]`. `places`,
    `[rows]` int64, is the page times `page_size` plus the slot in the page; rows with -1 are not
    written.
    """
    rows, heads, dim = k.shape
    _append[(rows,)](
        pages, k, v, places, pages.stride(0), pages.stride(1), k.stride(0), v.stride(0),
        pages.shape[2], heads * dim, triton.next_power_of_2(heads * dim),
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _append(  # type: ignore[no-untyped-def]
    pages, k, v, places,
    page_stride, value_offset, k_stride, v_stride,
    page_size: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row)
    if place >= 0:
        at = tl.arange(0, block)
        inside = at < width
        page = place // page_size
        target = pages + page * page_stride + (place - page * page_size) * width + at
        tl.store(target, tl.load(k + row * k_stride + at, mask=inside), mask=inside)
        tl.store(target + value_offset, tl.load(v + row * v_stride + at, mask=inside), mask=inside)

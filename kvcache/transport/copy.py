"""Copying KV from page to page: runs of bytes, each one `memcpy`."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from kvcache.types import PageId

__all__ = ["copy_span"]

_memcpy = ctypes.CDLL(None).memcpy  # lets go of the GIL while it copies
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = None


def copy_span(
    source: torch.Tensor,
    source_pages: Sequence[PageId],
    target: torch.Tensor,
    target_pages: Sequence[PageId],
    target_first: int,
    begin: int,
    end: int,
) -> int:
    """Copy the KV of positions `[begin, end)` of one layer, page to page; returns the bytes.

    `source` and `target` are contiguous CPU tensors `[pages, 2, page_size, kv_heads, head_dim]` of
    one shape but for the pages. `source_pages[i]` holds the positions from `i * page_size`;
    `target_pages[0]` those from `target_first * page_size`. A position's slot in its page is the
    same on both sides.

    Whole pages that follow each other on both sides go as one run. Of scattered pages each is one,
    and all are copied by one loop in C: a call of torch costs more than the bytes of a page.
    """
    size = source.shape[2]
    token = source[0, 0, 0].numel() * source.element_size()
    page = 2 * size * token
    into, out_of = target.data_ptr(), source.data_ptr()

    first, last = -(-begin // size), end // size  # the whole pages
    edges = [(begin, first * size), (last * size, end)] if first <= last else [(begin, end)]
    for low, high in edges:
        if low < high:
            index = low // size
            src = out_of + source_pages[index] * page + low % size * token
            dst = into + target_pages[index - target_first] * page + low % size * token
            for half in (0, size * token):  # keys, values
                _memcpy(dst + half, src + half, (high - low) * token)
    if first < last:
        of = np.asarray(source_pages[first:last])
        to = np.asarray(target_pages[first - target_first : last - target_first])
        broken = (np.diff(of) != 1) | (np.diff(to) != 1)
        starts = np.concatenate(([0], np.flatnonzero(broken) + 1))
        lengths = np.diff(np.concatenate((starts, [len(of)]))) * page
        runs = (into + to[starts] * page, out_of + of[starts] * page, lengths)
        deque(map(_memcpy, *(column.tolist() for column in runs)), maxlen=0)
    return (end - begin) * 2 * token

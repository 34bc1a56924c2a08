"""The parts of FlashInfer that the project uses, in torch under FlashInfer's names, without a GPU.

It reads the arrays as FlashInfer does, so it tests the arrays but not FlashInfer's kernels.
Log-sum-exps are to base 2, as in FlashInfer.
"""

from __future__ import annotations

import math
from typing import Any

import torch


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", backend: str = "auto"
    ) -> None:
        assert kv_layout == "NHD" and float_workspace_buffer.dtype == torch.uint8
        assert backend in ("auto", "fa2", "fa3")

    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor, paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *,
        causal: bool = False, q_data_type: Any = "float16", kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        for array in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert array.dtype == torch.int32 and array.device.type == "cpu" and array.dim() == 1
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert len(paged_kv_indices) == paged_kv_indptr[-1] and q_data_type == kv_data_type
        self.arrays = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self.shape, self.causal = (num_qo_heads, num_kv_heads, head_dim_qk, page_size), causal

    def run(
        self, q: torch.Tensor, paged_kv_cache: torch.Tensor, *,
        out: torch.Tensor | None = None, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        heads, kv_heads, dim, page_size = self.shape
        rows, begins, pages, last = self.arrays
        assert q.shape == (rows[-1], heads, dim)
        assert paged_kv_cache.shape[1:] == (2, page_size, kv_heads, dim)
        values = torch.empty_like(q) if out is None else out
        sums = torch.empty(q.shape[:2])
        for n in range(len(last)):
            mine = slice(rows[n], rows[n + 1])
            kv = paged_kv_cache[pages[begins[n] : begins[n + 1]].long()].transpose(0, 1)
            keys = (begins[n + 1] - begins[n] - 1) * page_size + last[n]
            k, v = kv.reshape(2, -1, kv_heads, dim)[:, :keys].float()
            k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->qhk", q[mine].float(), k) * dim**-0.5
            if self.causal:  # the rows are at the last keys' positions
                hidden = torch.ones(len(scores), int(keys)).triu(int(keys) - len(scores) + 1)
                scores.masked_fill_(hidden.bool()[:, None], -torch.inf)
            values[mine] = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
            sums[mine] = scores.logsumexp(-1) / math.log(2)
        return (values, sums) if return_lse else values


class BatchDecodeWithPagedKVCacheWrapper:
    """With buffers, as for CUDA graphs: `run` reads what `plan` has written there."""

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *,
        use_cuda_graph: bool = False, use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor, paged_kv_indices_buffer: torch.Tensor,
        paged_kv_last_page_len_buffer: torch.Tensor, backend: str = "auto",
    ) -> None:  # fmt: skip
        assert use_cuda_graph and use_tensor_cores and backend in ("auto", "fa2", "fa3")
        self.indptr, self.last = paged_kv_indptr_buffer, paged_kv_last_page_len_buffer
        self.indices = paged_kv_indices_buffer
        self.prefill = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self.plans = 0

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, *,
        q_data_type: Any = "float16", kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        assert len(indptr) == len(self.indptr) and len(indices) <= len(self.indices)
        assert len(last_page_len) == len(self.last)
        self.plans += 1
        self.indptr.copy_(indptr)
        self.indices[: len(indices)] = indices
        self.last.copy_(last_page_len)
        rows = torch.arange(len(indptr), dtype=torch.int32)
        self.shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self.prefill.plan(
            rows, indptr, indices, last_page_len, *self.shape,
            q_data_type=q_data_type, kv_data_type=kv_data_type,
        )  # fmt: skip

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(self.indptr), dtype=torch.int32)
        self.prefill.arrays = rows, self.indptr, self.indices, self.last
        values: torch.Tensor = self.prefill.run(q, paged_kv_cache)
        return values


def append_rows(
    pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: torch.Tensor
) -> None:
    """`kvcache.kernels.append_rows.append_rows`, which Triton runs on GPUs only."""
    page_size = pages.shape[2]
    for row, place in enumerate(places.tolist()):
        if place >= 0:
            pages[place // page_size, 0, place % page_size] = k[row]
            pages[place // page_size, 1, place % page_size] = v[row]


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    sums = torch.logaddexp2(s_a, s_b)
    a, b = (torch.exp2(s - sums)[..., None] for s in (s_a, s_b))
    return (a * v_a.float() + b * v_b.float()).to(v_a.dtype), sums


def append_paged_kv_cache(
    append_key: torch.Tensor, append_value: torch.Tensor, batch_indices: torch.Tensor,
    positions: torch.Tensor, paged_kv_cache: torch.Tensor, kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, kv_layout: str = "NHD",
) -> None:  # fmt: skip
    assert kv_layout == "NHD" and len(kv_last_page_len) + 1 == len(kv_indptr)
    assert len(append_key) == len(append_value) == len(batch_indices) == len(positions)
    page_size = paged_kv_cache.shape[2]
    first = kv_indptr[batch_indices.long()]
    page = kv_indices[(first + positions // page_size).long()].long()
    paged_kv_cache[page, 0, positions.long() % page_size] = append_key
    paged_kv_cache[page, 1, positions.long() % page_size] = append_value

"""Partial results of attention: what the softmax of some of a row's keys comes to, mergeable.

For the scores `s = q·k/√d` of a row with some keys, a partial result is `m = max s`,
`l = Σ e^(s − m)` and `o = Σ e^(s − m)·v`. Two of them, over different keys, merge to that of all
these keys: with `m = max(m₁, m₂)` and `αⱼ = e^(mⱼ − m)`, `l = α₁l₁ + α₂l₂` and `o = α₁o₁ + α₂o₂`.
The attention is `o / l` (Infinite-LLM, section 4.2, equations 3 to 5; the printed ones leave out
the values and the scale).

A merge gives the same bits in either order. It is associative up to rounding only, so what has to
be bit-stable merges in one order: see `kvcache.attention.block_tree`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Final, NamedTuple

import torch

from kvcache.errors import BadRequest

__all__ = ["LOWEST", "PartialAttention", "SoftmaxSums", "merge_into", "stable_kernel"]

log = logging.getLogger(__name__)

LOWEST: Final = torch.finfo(torch.float32).min  # finite, so LOWEST − LOWEST is no NaN


class SoftmaxSums(NamedTuple):
    """`o`, `m` and `l` as kernels hold them: float32, and writable in place."""

    values: torch.Tensor  # o: [..., head_dim]
    top: torch.Tensor  # m: [..., 1]
    total: torch.Tensor  # l: [..., 1]


@cache
def stable_kernel() -> ModuleType | None:
    """Return the kernel of float32 attention on CPUs, compiled; None where there is none.

    A merge has the bits of the kernel's own, or of torch's operations, whoever merges.
    """
    try:
        from kvcache.kernels import stable_attention
    except (ImportError, RuntimeError) as error:  # RuntimeError: numba's cache is not writable
        log.warning("attention in float32 is slow here: %s", error)
        return None
    return stable_attention


def merge_into(sums: SoftmaxSums, other: SoftmaxSums) -> None:
    """Merge `other`, of the same shape, into `sums`. Overwrites `other` too."""
    kernel = stable_kernel() if sums.values.device.type == "cpu" else None
    if kernel is not None:
        mine = [tensor.contiguous() for tensor in sums]
        kernel.merge(mine, [tensor.contiguous() for tensor in other])
        for tensor, merged in zip(sums, mine, strict=True):
            if merged is not tensor:
                tensor.copy_(merged)
        return
    top = torch.maximum(sums.top, other.top)
    scale = sums.top.sub_(top).exp_()
    other_scale = other.top.sub_(top).exp_()
    # Products and sums are apart: a fused multiplication and addition rounds once, where there is
    # one, and would not be the same in either order.
    sums.total.mul_(scale).add_(other.total.mul_(other_scale))
    sums.values.mul_(scale).add_(other.values.mul_(other_scale))
    sums.top.copy_(top)


@dataclass(frozen=True, slots=True, eq=False)
class PartialAttention:
    """The partial result of some query rows, each over some of its keys. float32.

    On a wire it is `heads·(4·head_dim + 8)` bytes per row. Raises `BadRequest` for tensors of other
    shapes or dtypes.
    """

    values: torch.Tensor  # o: [rows, heads, head_dim]
    top: torch.Tensor  # m: [rows, heads]; LOWEST where the row has no keys
    total: torch.Tensor  # l: [rows, heads]; 0 where the row has no keys

    def __post_init__(self) -> None:
        if self.values.dim() != 3:
            raise BadRequest(f"values are [rows, heads, head_dim], not {_shape(self.values)}")
        for name, tensor in (("maxima", self.top), ("sums", self.total)):
            if tensor.shape != self.values.shape[:2]:
                raise BadRequest(f"{name} are {_shape(tensor)} for values {_shape(self.values)}")
        dtypes = {tensor.dtype for tensor in (self.values, self.top, self.total)}
        if dtypes != {torch.float32}:
            raise BadRequest(f"partial results are float32, not {sorted(map(str, dtypes))}")

    @classmethod
    def neutral(
        cls, rows: int, heads: int, head_dim: int, device: torch.device | None = None
    ) -> PartialAttention:
        """Return the result over no keys; merging it changes nothing."""
        result = cls.empty(rows, heads, head_dim, device)
        result.fill_neutral()
        return result

    @classmethod
    def empty(
        cls, rows: int, heads: int, head_dim: int, device: torch.device | None = None
    ) -> PartialAttention:
        """Return memory for a result."""
        return cls(
            torch.empty(rows, heads, head_dim, device=device),
            torch.empty(rows, heads, device=device),
            torch.empty(rows, heads, device=device),
        )

    def fill_neutral(self) -> None:
        """Make this the result over no keys."""
        self.values.zero_()
        self.top.fill_(LOWEST)
        self.total.zero_()

    def copy_(self, other: PartialAttention) -> None:
        """Take the numbers of a result of the same shape, on any device."""
        self.values.copy_(other.values)
        self.top.copy_(other.top)
        self.total.copy_(other.total)

    @property
    def is_attention(self) -> bool:
        """Whether this can be what the softmax of some keys comes to, for each of its rows.

        That is without NaN and infinity, and no row is without keys.
        """
        every = (self.values, self.top, self.total)
        kernel = stable_kernel() if self.values.device.type == "cpu" else None
        if kernel is not None:
            return bool(kernel.is_attention(*(tensor.contiguous() for tensor in every)))
        finite = all(tensor.isfinite().all() for tensor in every)
        return bool(finite and (self.total > 0).all())

    @property
    def nbytes(self) -> int:
        """Bytes of the three tensors."""
        return self.values.nbytes + self.top.nbytes + self.total.nbytes

    def merge(self, other: PartialAttention) -> PartialAttention:
        """Return the result over the keys of both, which must not overlap.

        Raises `BadRequest` if `other` is for other rows or heads.
        """
        if self.values.shape != other.values.shape:
            raise BadRequest(
                f"partial results {_shape(self.values)} and {_shape(other.values)} do not merge"
            )
        merged = self._sums()
        merge_into(merged, other._sums())
        return PartialAttention(merged.values, merged.top.squeeze(-1), merged.total.squeeze(-1))

    def log_sum_exp(self) -> torch.Tensor:
        """Return `m + ln l`, `[rows, heads]` float32: −inf where a row has no keys."""
        return self.top + self.total.log()

    def output(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the attention over these keys, `o / l`, `[rows, heads, head_dim]`.

        Rows without keys are NaN. The sum of no products may be −0 or +0; here it is +0.
        """
        return (self.values / self.total.unsqueeze(-1)).add_(0.0).to(dtype)

    def _sums(self) -> SoftmaxSums:
        """Return copies."""
        return SoftmaxSums(
            self.values.clone(), self.top.unsqueeze(-1).clone(), self.total.unsqueeze(-1).clone()
        )


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)

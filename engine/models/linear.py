"""Products with weights: as they are loaded, packed, or in int8."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Int8Linear", "Linear", "OneDnnLinear", "PackedLinear", "empty_weight", "packed"]

log = logging.getLogger(__name__)

WIDENED = 1 << 22  # weights in int8 that are bfloat16 too at a time, at most


class Linear(nn.Module):
    """x · weightᵀ + bias; `weight` is `[out, in]`, `bias` `[out]` or None.

    Torch's own would first draw random weights, only to be overwritten.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_weight(outputs, inputs, dtype=dtype)
        self.bias = empty_weight(outputs, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """`x` `[rows, in]`; returns `[rows, out]`."""
        return F.linear(x, self.weight, self.bias)

    def rows(self, indices: Tensor) -> Tensor:
        """Those rows of the weight, `[len(indices), in]`, in the dtype that is computed in."""
        return F.embedding(indices, self.weight)


class PackedLinear(Linear):
    """The same in bfloat16 on a CPU, with the weight laid out for `engine.kernels.linear_bf16`."""

    def __init__(self, plain: Linear) -> None:
        """Only where it `fits`."""
        from engine.kernels import linear_bf16 as packed

        packed.compiled()
        nn.Module.__init__(self)
        self.weight = _constant(packed.pack(plain.weight))
        self.bias = plain.bias
        none = plain.weight.new_zeros(len(plain.weight))
        self._added: Tensor = none if plain.bias is None else plain.bias
        self._product, self._rows = packed.product, packed.rows_of

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x, self.weight, self._added)

    def rows(self, indices: Tensor) -> Tensor:
        return self._rows(self.weight, indices)


class OneDnnLinear(Linear):
    """The same in bfloat16 on a CPU, with the weight in the blocked layout of oneDNN, which
    otherwise makes it anew in each product (`bench/LOG.md` has what that costs)."""

    def __init__(self, plain: Linear) -> None:
        nn.Module.__init__(self)
        self.weight = _constant(torch.ops.mkldnn._reorder_linear_weight(plain.weight, None))
        self.bias = plain.bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out

    def rows(self, indices: Tensor) -> Tensor:
        raise TypeError("a packed weight has no rows")


def packed(plain: Linear) -> Linear:
    """`plain`, in bfloat16, as products are fastest on this CPU."""
    try:
        from engine.kernels.linear_bf16 import fits

        if fits(*plain.weight.shape):
            return PackedLinear(plain)
    except (ImportError, RuntimeError) as error:  # or it has nowhere to keep what it compiles
        _warn(f"products of few rows are slow here: {error}")
    return OneDnnLinear(plain)


class Int8Linear(Linear):
    """The same with the weight in int8 and a scale `[out]` for each of its rows; what is multiplied
    with it stays bfloat16. On a CPU.

    Symmetric: a weight w is scale · round(w / scale), off by half a scale at most. Scales are
    rounded to bfloat16 before weights are divided by them, so that this adds no error.
    """

    scale: Tensor

    def __init__(self, plain: Linear) -> None:
        nn.Module.__init__(self)
        wide = plain.weight.float()
        scale = (wide.abs().amax(1) / 127).bfloat16()
        scale.clamp_(min=torch.finfo(scale.dtype).tiny)  # of a row of zeros
        self.weight = _constant((wide / scale.float()[:, None]).round_().to(torch.int8))
        self.scale = _constant(scale)
        self.bias = plain.bias
        self._few = few_rows(*plain.weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) <= self._few.most:
            out = self._few.product(x, self.weight, self.scale)
        else:
            out = self._widened(x)
        return out if self.bias is None else out.add_(self.bias)

    def rows(self, indices: Tensor) -> Tensor:
        return self.weight[indices] * self.scale[indices, None]

    def _widened(self, x: Tensor) -> Tensor:
        """The product with the weight made bfloat16, which has all of int8, block by block."""
        size = max(1, WIDENED // self.weight.shape[1])
        parts = [F.linear(x, block.to(x.dtype)) for block in torch.split(self.weight, size)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return whole.mul_(self.scale)


class FewRows(NamedTuple):
    """What multiplies up to so many rows of x with a weight in int8."""

    most: int
    # (x [rows, in], weight [out, in], scale [out]): x · weightᵀ · scale
    product: Callable[[Tensor, Tensor, Tensor], Tensor]


def few_rows(outputs: int, inputs: int) -> FewRows:
    """The fastest there is for a weight `[outputs, inputs]`, up to where it is faster to widen the
    weight first (`bench/LOG.md`)."""
    try:
        from engine.kernels import linear_int8 as int8

        if int8.fits(outputs, inputs):
            int8.compiled()
            return FewRows(32, int8.product)
    except (ImportError, RuntimeError) as error:  # or it has nowhere to keep what it compiles
        _warn(f"products in int8 are slow here: {error}")
    # Torch's own reads beyond the end of rows that are not made of whole vectors.
    return FewRows(8 if inputs % 16 == 0 else 0, torch._weight_int8pack_mm)


@cache
def _warn(message: str) -> None:
    """Once, not for each weight."""
    log.warning(message)


def empty_weight(
    *shape: int, dtype: torch.dtype, device: torch.device | str = "meta"
) -> nn.Parameter:
    """A weight without values; on the meta device without memory too."""
    return _constant(torch.empty(shape, dtype=dtype, device=device))


def _constant(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)

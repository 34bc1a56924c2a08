"""Linear layers: plain, packed for the CPU, or quantized to int8."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "Int8Linear",
    "Linear",
    "OneDnnLinear",
    "PackedLinear",
    "WidenedLinear",
    "empty_weight",
    "pack",
]

log = logging.getLogger(__name__)

CONVERTED = 1 << 22  # the most weights whose dtype is converted at a time


class Linear(nn.Module):
    """x · weightᵀ + bias; `weight` is `[out, in]`, `bias` is `[out]` or None.

    Unlike `torch.nn.Linear`, this does not initialize the weights at random.
    """

    weight: Tensor
    bias: Tensor | None
    shape: tuple[int, int]  # outputs and inputs
    # Whether a kernel is kept for each number of rows that was multiplied: oneDNN does that.
    keeps_kernels = True

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = outputs, inputs
        self.weight = empty_weight(outputs, inputs, dtype=dtype)
        self.bias = empty_weight(outputs, dtype=dtype) if bias else None

    def _replace(self, plain: Linear) -> None:
        """Initialize this in place of `plain`; its weight is still to be set."""
        nn.Module.__init__(self)
        self.shape, self.bias = plain.shape, plain.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return `[rows, out]`; `x` is `[rows, in]`."""
        return F.linear(x, self.weight, self.bias)

    def rows(self, indices: Tensor) -> Tensor:
        """Return rows of the weight, `[len(indices), in]`, in the dtype of activations."""
        return F.embedding(indices, self.weight)


class PackedLinear(Linear):
    """A `Linear` on a CPU whose weight is packed for a kernel of its dtype.

    Those are `engine.kernels.linear_bf16` and `engine.kernels.linear_f32`.
    """

    keeps_kernels = False

    def __init__(self, plain: Linear) -> None:
        """Pack `plain`. Only where the kernel supports its weight."""
        kernels = _kernels(plain.weight.dtype)
        kernels.kernel()
        self._replace(plain)
        self.weight = _constant(kernels.pack(plain.weight))
        zeros = plain.weight.new_zeros(len(plain.weight))
        self._bias_or_zeros: Tensor = zeros if plain.bias is None else plain.bias
        self._product, self._rows = kernels.product, kernels.packed_rows

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._product(x, self.weight, self._bias_or_zeros)
        return out

    def rows(self, indices: Tensor) -> Tensor:
        found: Tensor = self._rows(self.weight, indices)
        return found


class OneDnnLinear(Linear):
    """A bfloat16 `Linear` on a CPU whose weight is in oneDNN's blocked layout.

    Otherwise oneDNN would reorder the weight in each product (`bench/LOG.md` has the cost).
    """

    def __init__(self, plain: Linear) -> None:
        self._replace(plain)
        self.weight = _constant(torch.ops.mkldnn._reorder_linear_weight(plain.weight, None))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out

    def rows(self, indices: Tensor) -> Tensor:
        raise TypeError("a weight in oneDNN's layout has no accessible rows")


class WidenedLinear(Linear):
    """A bfloat16 `Linear` on a CPU without bfloat16 products: it multiplies in float32.

    There torch's products of several rows take up to eight times as long in bfloat16. The weight
    is stored in bfloat16, and each product converts it, a block at a time.
    """

    keeps_kernels = False

    def __init__(self, plain: Linear) -> None:
        self._replace(plain)
        self.weight = plain.weight

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:  # torch's own product reads the weight once
            return super().forward(x)
        out = _converted_product(x, self.weight, torch.float32)
        return (out if self.bias is None else out.add_(self.bias)).to(x.dtype)


def pack(plain: Linear) -> Linear:
    """Return `plain`, a float32 or bfloat16 layer, in the form that is fastest on this CPU.

    In float32 that is one whose rows have the same bits however many there are, if there is one.
    """
    try:
        if _kernels(plain.weight.dtype).supports(*plain.shape):
            return PackedLinear(plain)
    except (ImportError, RuntimeError) as error:  # RuntimeError: numba's cache is not writable
        _warn_once(f"matrix products with few rows are slow here: {error}")
    if plain.weight.dtype == torch.float32:
        return plain
    if onednn_multiplies_bf16():
        return OneDnnLinear(plain)
    _warn_once(
        "this processor does not multiply bfloat16: float32 is faster, and takes more memory"
    )
    return WidenedLinear(plain)


def _kernels(dtype: torch.dtype) -> ModuleType:
    """Return the kernel of products of a dtype. Raises `ImportError` or `RuntimeError`."""
    if dtype == torch.float32:
        from engine.kernels import linear_f32

        return linear_f32
    from engine.kernels import linear_bf16

    return linear_bf16


def onednn_multiplies_bf16() -> bool:
    """Return whether this torch has oneDNN and it multiplies bfloat16 on this processor."""
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Int8Linear(Linear):
    """A `Linear` on a CPU with an int8 weight, one scale per output, and bfloat16 activations.

    The quantization is symmetric: a weight w becomes scale · round(w / scale), with an error of at
    most half a scale. Scales `[out]` are rounded to bfloat16 before the weights are divided by
    them, so this rounding adds no error.
    """

    scale: Tensor

    def __init__(self, plain: Linear) -> None:
        self._replace(plain)
        weight = plain.weight.float()
        scale = (weight.abs().amax(1) / 127).bfloat16()
        scale.clamp_(min=torch.finfo(scale.dtype).tiny)  # for rows of zeros
        self.weight = _constant((weight / scale.float()[:, None]).round_().to(torch.int8))
        self.scale = _constant(scale)
        self._few_rows = few_rows_kernel(*plain.weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) <= self._few_rows.max_rows:
            out = self._few_rows.product(x, self.weight, self.scale)
        else:
            out = self._dequantized_product(x)
        return out if self.bias is None else out.add_(self.bias)

    def rows(self, indices: Tensor) -> Tensor:
        return self.weight[indices] * self.scale[indices, None]

    def _dequantized_product(self, x: Tensor) -> Tensor:
        """Multiply with the weight in bfloat16, which represents int8 exactly, or in float32."""
        dtype = torch.bfloat16 if onednn_multiplies_bf16() else torch.float32
        return _converted_product(x, self.weight, dtype).mul_(self.scale).to(x.dtype)


def _converted_product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x · weightᵀ computed in `dtype`; convert `weight` a block at a time."""
    size = max(1, CONVERTED // weight.shape[1])
    x = x.to(dtype)
    parts = [F.linear(x, block.to(dtype)) for block in torch.split(weight, size)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class FewRowsKernel(NamedTuple):
    """A product of at most `max_rows` rows with an int8 weight."""

    max_rows: int
    # (x [rows, in], weight [out, in], scale [out]): x · weightᵀ · scale
    product: Callable[[Tensor, Tensor, Tensor], Tensor]


def few_rows_kernel(outputs: int, inputs: int) -> FewRowsKernel:
    """Return the fastest kernel for a weight `[outputs, inputs]`.

    Its `max_rows` is where converting the weight to bfloat16 becomes faster (`bench/LOG.md`).
    """
    try:
        from engine.kernels import linear_int8

        if linear_int8.supports(outputs, inputs):
            linear_int8.kernel()
            return FewRowsKernel(32, linear_int8.product)
    except (ImportError, RuntimeError) as error:  # RuntimeError: numba's cache is not writable
        _warn_once(f"matrix products with int8 weights are slow here: {error}")
    # Torch's kernel reads beyond the end of rows that are not a multiple of its vectors.
    return FewRowsKernel(8 if inputs % 16 == 0 else 0, torch._weight_int8pack_mm)


@cache
def _warn_once(message: str) -> None:
    """Log a warning once, not for each weight."""
    log.warning(message)


def empty_weight(
    *shape: int, dtype: torch.dtype, device: torch.device | str = "meta"
) -> nn.Parameter:
    """Return an uninitialized weight; on the meta device it takes no memory."""
    return _constant(torch.empty(shape, dtype=dtype, device=device))


def _constant(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)

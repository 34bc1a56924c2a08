"""Register tiles of bfloat16 products against torch's products in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache.kernels.avx512_bf16 import available
from kvcache.kernels.gemm_tile import ROWS, WIDTH, multiply, multiply_add
from kvcache.kernels.jit import ParallelKernel, i64_at, next_item

pytestmark = pytest.mark.skipif(
    not available(), reason="this processor has no AVX-512 BF16: tiles are not used on it"
)


def product(address: Any) -> None:
    a = i64_at(address)
    while next_item(address) >= 0:
        multiply(a[2], a[3], a[4], a[5], a[6], a[7])


def product_added(address: Any) -> None:
    a = i64_at(address)
    while next_item(address) >= 0:
        multiply_add(a[2], a[3], a[4], a[5], a[6], a[7], a[8])


@pytest.mark.parametrize("depth", [2, 64, 126])
def test_products(depth: int) -> None:
    """Multiply parts of larger matrices into a part of another, whose rest does not change."""
    generator = torch.Generator().manual_seed(depth)
    a = torch.randn(ROWS, depth + 10, generator=generator).bfloat16()
    b = torch.randn(depth, WIDTH, generator=generator).bfloat16()
    pairs = b.view(depth // 2, 2, WIDTH).transpose(1, 2).contiguous()
    c = torch.randn(ROWS + 1, WIDTH + 3, generator=generator)
    scale = torch.rand(ROWS, generator=generator)
    strides = depth, 2 * (depth + 10), 4 * (WIDTH + 3)
    wanted = c.clone()
    wanted[:ROWS, :WIDTH] = a[:, :depth].float() @ b.float()
    ParallelKernel(product).run_serial(1, a.data_ptr(), pairs.data_ptr(), c.data_ptr(), *strides)
    torch.testing.assert_close(c, wanted, atol=1e-5, rtol=1e-5)

    # c = a·b now, so c · scale + a·b = (1 + scale) · a·b.
    wanted[:ROWS, :WIDTH] *= 1 + scale[:, None]
    ParallelKernel(product_added).run_serial(
        1, a.data_ptr(), pairs.data_ptr(), c.data_ptr(), *strides, scale.data_ptr()
    )
    torch.testing.assert_close(c, wanted, atol=1e-4, rtol=1e-4)

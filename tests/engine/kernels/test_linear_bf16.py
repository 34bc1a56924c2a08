"""bfloat16 products: packed weights, else oneDNN's, else float32's."""

from __future__ import annotations

from functools import partial

import plain_linears
import pytest
import torch

from engine.kernels import linear_bf16
from engine.models import load_model
from engine.models.linear import (
    Linear,
    OneDnnLinear,
    PackedLinear,
    WidenedLinear,
    onednn_multiplies_bf16,
    pack,
)
from kvcache.kernels.avx512_bf16 import available

CPU = torch.device("cpu")
needs = pytest.mark.skipif(
    not linear_bf16.supports(64, 2),
    reason="our products in bfloat16 need AVX-512 BF16 and no AMX",
)
needs_onednn = pytest.mark.skipif(
    not onednn_multiplies_bf16(), reason="oneDNN does not multiply bfloat16 on this processor"
)


linear = partial(plain_linears.linear, dtype=torch.bfloat16)
random = partial(plain_linears.random, dtype=torch.bfloat16)


def check_products(ours: Linear, plain: Linear, rows: int) -> None:
    outputs, inputs = plain.weight.shape
    # Strided rows: the kernel must not use the elements between them.
    x = random(rows, 2 * inputs, seed=2)[:, :inputs]
    expected = x.double() @ plain.weight.double().T
    if plain.bias is not None:
        expected += plain.bias.double()
    out = ours(x)
    assert out.dtype == torch.bfloat16 and out.shape == (rows, outputs)
    adding = 1e-5 * (x.abs().double() @ plain.weight.abs().double().T + 1)
    assert ((out.double() - expected).abs() <= 2**-8 * expected.abs() + adding).all()


@needs
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 11, 12, 64, 131])
@pytest.mark.parametrize(("outputs", "inputs", "bias"), [(64, 2, True), (192, 70, False)])
def test_products_agree_with_torch(outputs: int, inputs: int, bias: bool, rows: int):
    plain = linear(outputs, inputs, bias=bias)
    ours = pack(plain)
    assert isinstance(ours, PackedLinear)
    check_products(ours, plain, rows)


@pytest.mark.parametrize("rows", [1, 2, 131])
@pytest.mark.parametrize(("outputs", "inputs", "bias"), [(64, 64, True), (193, 71, False)])
def test_products_are_in_float32_where_nothing_multiplies_bfloat16(
    monkeypatch: pytest.MonkeyPatch, outputs: int, inputs: int, bias: bool, rows: int
):
    monkeypatch.setattr(linear_bf16, "available", lambda: False)
    monkeypatch.setattr("engine.models.linear.onednn_multiplies_bf16", lambda: False)
    monkeypatch.setattr("engine.models.linear.CONVERTED", 50 * inputs)  # blocks of 50 outputs
    plain = linear(outputs, inputs, bias=bias)
    ours = pack(plain)
    assert isinstance(ours, WidenedLinear) and ours.weight is plain.weight
    check_products(ours, plain, rows)
    assert torch.equal(ours.rows(torch.tensor([3, 1])), plain.weight[[3, 1]])


@needs
def test_a_row_has_the_same_bits_among_others():
    ours = pack(linear(128, 576))
    x = random(40, 576, seed=3)
    whole = ours(x)
    for rows in (1, 2, 4, 5, 6, 9):
        assert torch.equal(ours(x[:rows]), whole[:rows])


@needs
def test_rows_of_a_packed_weight_are_the_weights_rows():
    plain = linear(192, 6)
    indices = torch.tensor([191, 0, 64, 63, 64])
    assert torch.equal(pack(plain).rows(indices), plain.weight[indices])


@needs_onednn
@pytest.mark.parametrize(("outputs", "inputs"), [(63, 64), (64, 3)])
def test_weights_that_do_not_divide_into_blocks_use_onednn(outputs: int, inputs: int):
    assert isinstance(pack(linear(outputs, inputs)), OneDnnLinear)


@needs_onednn
@pytest.mark.parametrize(("feature", "there"), [("amx-bf16", True), ("avx512bf16", False)])
@pytest.mark.slow
def test_processors_with_amx_or_without_avx512_bf16_use_onednn(monkeypatch, feature, there):
    has = {"avx512bf16": True, "amx-bf16": False} | {feature: there}
    monkeypatch.setattr(linear_bf16, "available", lambda: has["avx512bf16"])
    monkeypatch.setattr(linear_bf16, "has_feature", has.__getitem__)
    plain = linear(64, 64, bias=True)
    theirs = pack(plain)
    assert isinstance(theirs, OneDnnLinear)
    x = random(5, 64, seed=2)
    torch.testing.assert_close(theirs(x), torch.nn.functional.linear(x, plain.weight, plain.bias))


@needs
@pytest.mark.slow
def test_tied_embeddings_are_stored_once():
    model = load_model("smollm2", dtype=torch.bfloat16, device=CPU).transformer
    assert model is not None and model.embed is model.head
    assert isinstance(model.head, PackedLinear) and available()

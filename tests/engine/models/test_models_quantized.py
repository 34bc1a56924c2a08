"""int8 weights: their rounding error, their products, and that all are quantized."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import DenseCache, greedy, hf_model, load, run_in_steps, save_folder
from torch import Tensor

from engine.models import LoadedModel, UnsupportedDtype, load_model
from engine.models.linear import Int8Linear, Linear

TOKENS = torch.randint(0, 512, (61,), generator=torch.Generator().manual_seed(1)).tolist()
CPU = torch.device("cpu")


def quantized(name: str) -> LoadedModel:
    return load_model(name, dtype=torch.bfloat16, device=CPU, quantization="int8")


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return a bfloat16 layer as the loader builds it."""
    outputs, inputs = weight.shape
    plain = Linear(inputs, outputs, bias=bias is not None, dtype=torch.bfloat16)
    plain.weight = torch.nn.Parameter(weight.bfloat16(), requires_grad=False)
    if bias is not None:
        plain.bias = torch.nn.Parameter(bias.bfloat16(), requires_grad=False)
    return plain


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=50, deadline=None)
@given(
    outputs=st.integers(1, 9),
    inputs=st.integers(1, 70),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_weights_error_is_at_most_half_a_scale(outputs, inputs, exponent, seed):
    rows = random(outputs, inputs, seed=seed) * 2.0**exponent * random(outputs, 1, seed=seed + 1)
    rows[0] = 0.0
    plain = linear(rows)
    int8 = Int8Linear(plain)
    weight, scale = plain.weight.double(), int8.scale.double()[:, None]
    assert int8.weight.dtype == torch.int8 and int8.weight.abs().max() <= 127
    assert ((int8.weight * scale - weight).abs() <= scale / 2).all()
    # A scale fits the largest weight of its row, up to one rounding.
    assert (scale <= weight.abs().amax(1, keepdim=True) / 127 * (1 + 2**-8) + 1e-37).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 13, 32, 33, 70])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [
        (64, 64),
        (129, 96),  # one output more than a whole number of work items
        (3, 64),  # less than a tile
        (40, 48),  # torch's kernel applies
        (40, 100),  # no kernel applies
    ],
)
def test_products_agree_with_the_rounded_weights(outputs: int, inputs: int, rows: int):
    int8 = Int8Linear(linear(random(outputs, inputs), random(outputs, seed=1)))
    x = random(rows, inputs, seed=2).bfloat16()
    ours = int8(x)
    assert ours.dtype == torch.bfloat16 and ours.shape == (rows, outputs)
    assert int8.bias is not None
    weight, bias = int8.weight.double() * int8.scale.double()[:, None], int8.bias.double()
    product = x.double() @ weight.T
    # Three roundings: after the sum, the scale and the bias.
    rounding = 2**-8 * (3 * product.abs() + bias.abs())
    adding = 1e-5 * x.abs().double() @ weight.abs().T
    assert ((ours.double() - product - bias).abs() <= rounding + adding).all()


def test_a_product_of_rows_that_are_not_dense():
    int8 = Int8Linear(linear(random(64, 64)))
    x = random(4, 128).bfloat16()
    assert torch.equal(int8(x[:, :64]), int8(x[:, :64].contiguous()))


def test_a_large_weight_is_widened_in_blocks(monkeypatch: pytest.MonkeyPatch):
    int8 = Int8Linear(linear(random(100, 64)))
    x = random(70, 64, seed=1).bfloat16()
    whole = int8(x)
    monkeypatch.setattr("engine.models.linear.CONVERTED", 7 * 64)
    torch.testing.assert_close(int8(x), whole, atol=0, rtol=2**-7)


def test_rows_of_a_quantized_weight_are_the_rounded_rows():
    int8 = Int8Linear(linear(random(9, 64)))
    indices = torch.tensor([8, 0, 0])
    expected = (int8.weight[indices].float() * int8.scale[indices, None].float()).bfloat16()
    assert torch.equal(int8.rows(indices), expected)


CASES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2-bias": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_near_those_of_bfloat16(case: str, tmp_path):
    kind, options = CASES[case]
    path = save_folder(hf_model(kind, **options), tmp_path)
    plain, int8 = load(path, torch.bfloat16), quantized(str(path))
    ours = run_in_steps(int8.transformer, DenseCache(int8.config), TOKENS)
    theirs = run_in_steps(plain.transformer, DenseCache(plain.config), TOKENS)
    assert ours.dtype == torch.float32
    difference = (ours - theirs).abs().mean() / theirs.abs().mean()
    assert 0 < difference < 0.1


@pytest.mark.parametrize("case", CASES)
def test_every_product_is_int8_and_weights_are_stored_once(case: str, tmp_path):
    kind, options = CASES[case]
    path = save_folder(hf_model(kind, **options), tmp_path)
    plain = load(path).transformer
    int8 = quantized(str(path)).transformer
    assert plain is not None and int8 is not None
    weights = {name: weight.numel() for name, weight in plain.named_parameters()}
    multiplied = {
        name: count
        for name, count in weights.items()
        if name.endswith(".weight") and "norm" not in name
    }
    tied = plain.head is plain.embed
    if not tied:
        del multiplied["embed.weight"]  # the embedding is only looked up
    scales = sum(len(linear.weight) for linear in int8.modules() if isinstance(linear, Int8Linear))
    found: Counter[torch.dtype] = Counter()
    for weight in int8.parameters():
        found[weight.dtype] += weight.numel()
    rest = sum(weights.values()) - sum(multiplied.values())
    assert found == {torch.int8: sum(multiplied.values()), torch.bfloat16: rest + scales}
    assert (int8.head is int8.embed) is tied
    for layer in int8.layers:
        kinds = [type(child) for child in layer.children() if isinstance(child, Linear)]
        assert kinds == [Int8Linear] * 4
        assert (layer.qkv.bias is not None) is (kind == "Qwen2")


def test_a_quantized_model_generates():
    model = quantized("tiny")
    plain = load("tiny", torch.bfloat16)
    prompt = list(b"The quick brown fox")
    ours = greedy(model.transformer, DenseCache(model.config), prompt, 20)
    assert len(set(ours)) > 10
    assert ours[0] == greedy(plain.transformer, DenseCache(plain.config), prompt, 1)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_another_dtype_is_refused(dtype: torch.dtype):
    with pytest.raises(UnsupportedDtype, match="--dtype bfloat16"):
        load_model("tiny", dtype=dtype, device=CPU, quantization="int8")


def test_another_device_is_refused():
    with pytest.raises(UnsupportedDtype, match="--device cpu"):
        load_model("tiny", dtype=torch.bfloat16, device=torch.device("cuda"), quantization="int8")

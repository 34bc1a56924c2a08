"""float32 products with packed weights: right, and with the same bits for any number of rows."""

from __future__ import annotations

from functools import partial

import plain_linears
import pytest
import torch

from engine.kernels import linear_f32
from engine.models import load_model
from engine.models.linear import Linear, PackedLinear, pack

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    not linear_f32.supports(16, 1),
    reason="this processor does not multiply and add in one operation",
)


linear = partial(plain_linears.linear, dtype=torch.float32)
random = partial(plain_linears.random, dtype=torch.float32)


@pytest.fixture(params=[1, 2])
def _threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 7, 95, 96, 97, 300])
@pytest.mark.parametrize(
    ("outputs", "inputs", "bias"), [(16, 1, True), (80, 71, False), (1536, 576, True)]
)
def test_products_are_right(outputs: int, inputs: int, bias: bool, rows: int):
    plain = linear(outputs, inputs, bias=bias)
    ours = pack(plain)
    assert isinstance(ours, PackedLinear) and ours.shape == (outputs, inputs)
    # Strided rows: the kernel must not use the elements between them.
    x = random(rows, 2 * inputs, seed=2)[:, :inputs]
    expected = x.double() @ plain.weight.double().T
    if plain.bias is not None:
        expected += plain.bias.double()
    out = ours(x)
    assert out.dtype == torch.float32 and out.shape == (rows, outputs)
    error = 2**-24 * (inputs + 2) * (x.abs().double() @ plain.weight.abs().double().T + 4)
    assert ((out.double() - expected).abs() <= error).all()


def test_a_row_has_the_same_bits_among_any_others_with_any_threads():
    ours = pack(linear(1536, 576, bias=True))
    x = random(250, 576, seed=3)
    whole = ours(x)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in (1, 2, 3, 4, 5, 6, 7, 12, 95, 96, 97, 249):
                for first in (0, 1, 250 - rows):
                    part = x[first : first + rows]
                    assert torch.equal(ours(part), whole[first : first + rows])
    finally:
        torch.set_num_threads(before)


def test_outputs_have_the_same_bits_in_a_part_of_the_weight():
    """A worker of `--tp 2` has some of the outputs."""
    plain, x = linear(96, 70), random(9, 70, seed=3)
    part = Linear(70, 32, bias=False, dtype=torch.float32)
    part.weight = torch.nn.Parameter(plain.weight[48:80], requires_grad=False)
    assert torch.equal(pack(part)(x), pack(plain)(x)[:, 48:80])


def test_nan_and_infinity_stay_in_their_rows():
    ours, x = pack(linear(32, 20)), random(8, 20, seed=3)
    expected = ours(x)
    x[3, 5], x[6, 0] = torch.nan, torch.inf
    out = ours(x)
    assert out[3].isnan().all() and not out[6].isfinite().any()
    others = [0, 1, 2, 4, 5, 7]
    assert torch.equal(out[others], expected[others])


def test_rows_of_a_packed_weight_are_the_weights_rows():
    plain = linear(192, 6)
    indices = torch.tensor([191, 0, 64, 63, 64])
    assert torch.equal(pack(plain).rows(indices), plain.weight[indices])


@pytest.mark.parametrize(("outputs", "inputs"), [(17, 16), (8, 3)])
def test_weights_that_do_not_divide_into_panels_stay_as_they_are(outputs: int, inputs: int):
    plain = linear(outputs, inputs)
    assert pack(plain) is plain


def test_without_the_kernel_weights_stay_as_they_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear_f32, "available", lambda: False)
    plain = linear(32, 16)
    assert pack(plain) is plain


@pytest.mark.slow
def test_tied_embeddings_are_stored_once():
    model = load_model("smollm2", dtype=torch.float32, device=CPU).transformer
    assert model is not None and model.embed is model.head
    assert isinstance(model.head, PackedLinear)

"""Partial results merge exactly: neutral, in either order, and up to rounding in any grouping."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention_holders import bits
from attention_world import BACKENDS, backend
from hypothesis import given
from hypothesis import strategies as st

from kvcache.attention.partial import LOWEST, PartialAttention
from kvcache.errors import BadRequest

ROWS, HEADS, DIM = 5, 3, 8


@pytest.fixture(autouse=True, params=BACKENDS, scope="module")
def attention(request: pytest.FixtureRequest) -> Iterator[None]:
    with backend(request.param):
        yield


def partial(seed: int, size: float = 1.0) -> tuple[PartialAttention, torch.Tensor, torch.Tensor]:
    """Return the partial result of some keys, their scores and their values."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(ROWS, HEADS, seed % 7 + 1, generator=generator) * size
    values = torch.randn(ROWS, HEADS, seed % 7 + 1, DIM, generator=generator)
    top = scores.amax(-1)
    weights = (scores - top[..., None]).exp()
    summed = torch.einsum("rhk,rhkd->rhd", weights, values)
    return PartialAttention(summed, top, weights.sum(-1)), scores, values


def same(one: PartialAttention, other: PartialAttention) -> bool:
    pairs = ((one.values, other.values), (one.top, other.top), (one.total, other.total))
    return all(torch.equal(bits(mine), bits(yours)) for mine, yours in pairs)


seeds = st.integers(0, 10_000)
sizes = st.sampled_from([0.0, 1.0, 30.0, 1e4])


@given(seeds, seeds, sizes)
def test_a_merge_is_commutative_to_the_bit(one: int, other: int, size: float):
    a, b = partial(one)[0], partial(other, size)[0]
    assert same(a.merge(b), b.merge(a))


@given(seeds, seeds, seeds, sizes)
def test_a_merge_is_associative_within_rounding(one: int, two: int, three: int, size: float):
    a, b, c = partial(one)[0], partial(two, size)[0], partial(three)[0]
    left, right = a.merge(b).merge(c), a.merge(b.merge(c))
    torch.testing.assert_close(left.output(), right.output(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(left.log_sum_exp(), right.log_sum_exp(), atol=1e-5, rtol=1e-6)


@given(seeds, seeds, sizes)
def test_a_merge_is_the_softmax_over_the_keys_of_both(one: int, other: int, size: float):
    a, a_scores, a_values = partial(one)
    b, b_scores, b_values = partial(other, size)
    scores = torch.cat([a_scores, b_scores], -1).double()
    values = torch.cat([a_values, b_values], 2).double()
    golden = torch.einsum("rhk,rhkd->rhd", scores.softmax(-1), values)
    merged = a.merge(b)
    torch.testing.assert_close(merged.output().double(), golden, atol=1e-5, rtol=1e-5)
    expected = scores.logsumexp(-1)
    torch.testing.assert_close(merged.log_sum_exp().double(), expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("top", [0.5, 3e38, -3e38])
def test_the_neutral_result_changes_nothing(top: float):
    some, neutral = partial(3)[0], PartialAttention.neutral(ROWS, HEADS, DIM)
    some = PartialAttention(some.values, torch.full_like(some.top, top), some.total)
    assert same(some.merge(neutral), some)
    assert same(neutral.merge(some), some)
    assert same(neutral.merge(neutral), neutral)
    assert (neutral.top == LOWEST).all()
    assert neutral.output().isnan().all()


def test_a_merge_leaves_its_operands_alone():
    one, other = partial(1)[0], partial(2)[0]
    one.merge(other)
    assert same(one, partial(1)[0])
    assert same(other, partial(2)[0])


def test_an_output_has_no_negative_zeros():
    some = PartialAttention(torch.full((1, 1, 2), -0.0), torch.zeros(1, 1), torch.ones(1, 1))
    assert not bits(some.output()).any()
    assert some.output(torch.bfloat16).dtype == torch.bfloat16


def test_other_shapes_and_dtypes_are_refused():
    values, sums = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    with pytest.raises(BadRequest, match="values are"):
        PartialAttention(values[0], sums, sums)
    with pytest.raises(BadRequest, match="maxima are"):
        PartialAttention(values, sums[:1], sums)
    with pytest.raises(BadRequest, match="sums are"):
        PartialAttention(values, sums, sums.T)
    with pytest.raises(BadRequest, match="bfloat16"):
        PartialAttention(values.bfloat16(), sums, sums)
    with pytest.raises(BadRequest, match="do not merge"):
        PartialAttention(values, sums, sums).merge(PartialAttention.neutral(2, 3, 5))

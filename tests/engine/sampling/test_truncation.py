from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import Sampling
from engine.sampling.logits import rows_of
from engine.sampling.truncation import least_logits

VOCAB = 40


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def kept(rows: torch.Tensor, samplings: list[Sampling]) -> list[set[int]]:
    """Return the tokens of each row that pass the filters."""
    least = least_logits(rows_of(rows), rows.amax(-1, keepdim=True).numpy(), samplings)
    left = rows.numpy() >= least
    return [set(row.nonzero()[0].tolist()) for row in left]


def naive(row: list[float], sampling: Sampling) -> set[int]:
    """Return the tokens that pass min_p, then top_k, then top_p."""
    most = max(row)
    p = {i: math.exp((x - most) / sampling.temperature) for i, x in enumerate(row)}
    kept = {i for i, x in p.items() if x >= sampling.min_p}
    if sampling.top_k:
        kept = set(sorted(kept, key=lambda i: -p[i])[: sampling.top_k])
    rest = math.fsum(p[i] for i in kept)
    before, out = 0.0, set()
    for i in sorted(kept, key=lambda i: -p[i]):
        if before < sampling.top_p:
            out.add(i)
        before += p[i] / rest
    return out


SAMPLING = st.builds(
    Sampling,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 39, 40, 100]),
    top_p=st.sampled_from([0.01, 0.3, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 10_000),
    st.lists(SAMPLING, min_size=1, max_size=6),
    st.sampled_from([(1024, 8192), (3, 9), (8,), (39,)]),
)
def test_kept_tokens_agree_with_the_definitions(
    seed: int, samplings: list[Sampling], widths: tuple[int, ...]
):
    """The batches mix all kinds of rows; every initial width of the search is tested."""
    rows = logits_of(seed, len(samplings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.sampling.truncation.WIDTHS", widths)
        found = kept(rows, samplings)
    assert found == [naive(row.tolist(), one) for row, one in zip(rows, samplings, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.9}, {"top_p": 0.99999}, {"top_k": 3000}, {"top_k": 50, "top_p": 0.9},
        {"min_p": 1e-4, "top_p": 0.99}, {"top_k": 20_000, "top_p": 0.999},
    ],
)  # fmt: skip
def test_kept_tokens_in_a_real_vocabulary(options: dict[str, Any]):
    """Except for a token exactly at the threshold: float32 sums of many terms differ in bits."""
    rows = logits_of(3, 2, vocab=49152)
    sampling = Sampling(temperature=1.2, **options)
    for row, found in zip(rows, kept(rows, [sampling] * 2), strict=True):
        assert len(found ^ naive(row.tolist(), sampling)) <= 1


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.1}, {"min_p": 0.9}])
def test_equal_tokens_are_kept_or_dropped_together(options: dict[str, Any]):
    row = torch.zeros(1, VOCAB)
    row[0, 30:] = -5.0
    assert kept(row, [Sampling(**options)]) == [set(range(30))]


def test_the_most_likely_token_is_always_kept():
    rows = logits_of(8, 4)
    for options in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert kept(rows, [Sampling(**options)] * 4) == [{n} for n in rows.argmax(-1).tolist()]

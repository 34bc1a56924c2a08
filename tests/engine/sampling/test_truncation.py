from __future__ import annotations

import math
from typing import Any

import numpy as np
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


class Counted:
    """Rows that note how many top logits are searched, and which rows are summed."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._rows = rows_of(logits)
        self.widths: list[tuple[int, list[int]]] = []
        self.summed: list[int] = []
        self.shape = self._rows.shape

    def largest(self, rows: list[int], width: int) -> Any:
        self.widths.append((width, list(rows)))
        return self._rows.largest(rows, width)

    def exp_sum(self, row: int, temperature: float, least: float) -> float:
        self.summed.append(row)
        return self._rows.exp_sum(row, temperature, least)


def searched(logits: torch.Tensor, *options: dict[str, Any]) -> Counted:
    """Truncate one row for each of `options`."""
    rows = Counted(logits.expand(len(options), -1))
    top = logits.amax(-1, keepdim=True).expand(len(options), -1).numpy()
    with np.errstate(all="raise", under="ignore"):
        least_logits(rows, top, [Sampling(**each) for each in options])  # type: ignore[arg-type]
    return rows


def test_rows_without_top_k_and_top_p_are_not_searched():
    none = searched(
        logits_of(1),
        {}, {"min_p": 0.1}, {"top_k": VOCAB}, {"top_k": VOCAB + 1}, {"temperature": 0.5},
    )  # fmt: skip
    assert none.widths == [] and none.summed == []


def test_a_small_vocabulary_is_searched_once_and_whole():
    some = searched(logits_of(1), {"top_k": 39}, {}, {"top_p": 0.9}, {"top_k": 1, "top_p": 0.5})
    assert some.widths == [(VOCAB, [0, 2, 3])] and some.summed == []


def test_the_search_widens_only_for_rows_that_need_it():
    flat = logits_of(2, vocab=20_000) / 100
    some = searched(
        flat,
        {"top_k": 1024},
        {"top_k": 1025},
        {"top_p": 0.01},
        {"top_p": 0.2},
        {"top_k": 8192, "top_p": 0.9999},
        {"top_k": 8193},
        {"top_k": 20_000, "top_p": 0.01},
        {"top_p": 0.9},
    )
    assert some.widths == [
        (1024, [0, 1, 2, 3, 4, 5, 6, 7]),
        (8192, [1, 3, 4, 5, 7]),
        (20_000, [5, 7]),
    ]


def test_only_the_rows_of_a_nucleus_are_summed():
    """Those whose kept logits may lie beyond the searched ones."""
    flat = logits_of(2, vocab=2000) / 100
    some = searched(
        flat,
        {"top_k": 5},
        {"top_p": 0.1},
        {"top_k": 5, "top_p": 0.1},
        {"top_k": 1024, "top_p": 0.1},
        {"top_k": 1024},
    )
    assert some.summed == [1, 3]


def test_equal_logits_beyond_the_searched_ones_count(monkeypatch: pytest.MonkeyPatch):
    """The top two keep nine equal ones, of which the search sees one."""
    monkeypatch.setattr("engine.sampling.truncation.WIDTHS", (2,))
    row = torch.full((1, VOCAB), -9.0)
    row[0, 7] = math.log(2)
    row[0, 10:19] = 0.0
    assert kept(row, [Sampling(top_k=2, top_p=0.1)]) == [{7}]
    assert kept(row, [Sampling(top_k=2, top_p=0.5)]) == [{7, *range(10, 19)}]


@pytest.mark.parametrize("top_k", [2, 3, 4, 5])
def test_the_kth_logit_is_kept_also_at_the_end_of_the_search(
    monkeypatch: pytest.MonkeyPatch, top_k: int
):
    monkeypatch.setattr("engine.sampling.truncation.WIDTHS", (3,))
    row = -torch.arange(10.0)[None]
    assert kept(row, [Sampling(top_k=top_k)]) == [set(range(top_k))]


def test_without_top_p_the_least_likely_tokens_are_kept_too():
    """Their probability is lost in the rounding of the sum."""
    row = torch.tensor([[0.0, -1.0, -60.0, -80.0]])
    assert kept(row, [Sampling(top_k=3)]) == [{0, 1, 2}]
    assert kept(row, [Sampling(top_k=3, top_p=0.999)]) == [{0, 1}]

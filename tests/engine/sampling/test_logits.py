"""Both kinds of rows against plain torch operations; `DeviceRows` runs on the CPU here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.sampling.logits import DeviceRows, HostRows, Rows, rows_of

Kind = Callable[[torch.Tensor], Rows]
KINDS: list[Kind] = [lambda logits: HostRows(logits.numpy()), DeviceRows]


def logits_of(rows: int, vocab: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3


@pytest.fixture(params=KINDS, ids=["host", "device"])
def kind(request: pytest.FixtureRequest) -> Kind:
    made: Kind = request.param
    return made


def test_rows_of_chooses_by_device():
    assert isinstance(rows_of(logits_of(1, 3)), HostRows)
    assert isinstance(rows_of(logits_of(1, 3).to("meta")), DeviceRows)


def test_argmax_is_the_first_of_equal_maxima(kind: Kind):
    logits = logits_of(4, 100)
    logits[:, [70, 80]] = 50.0
    logits[3] = -torch.inf
    assert kind(logits).argmax().tolist() == [70, 70, 70, 0]


@pytest.mark.parametrize("count", [7, 8])
@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 24, 29])
def test_group_maxima(kind: Kind, vocab: int, count: int):
    logits = logits_of(3, vocab)
    groups = [logits[:, group::count] for group in range(count)]
    expected = [
        group.amax(-1) if group.numel() else torch.full((3,), -torch.inf) for group in groups
    ]
    assert kind(logits).group_maxima(count).tolist() == torch.stack(expected, 1).tolist()


@pytest.mark.parametrize("width", [1, 5, 100])
def test_largest_logits_of_selected_rows(kind: Kind, width: int):
    logits = logits_of(4, 100)
    expected = logits[[3, 1]].sort(descending=True).values[:, :width]
    assert kind(logits).largest([3, 1], width).tolist() == expected.tolist()


def test_selected_rows(kind: Kind):
    logits = logits_of(4, 100)
    few = kind(logits).select([3, 1])
    assert few.shape == (2, 100)
    assert few.argmax().tolist() == logits[[3, 1]].argmax(-1).tolist()


def test_single_logits(kind: Kind):
    logits = logits_of(4, 100)
    rows, tokens = np.array([[3], [0]]), np.array([[5, 99], [0, 1]])
    assert kind(logits).at(rows, tokens).tolist() == logits[rows, tokens].tolist()


@pytest.mark.parametrize("least", [-float("inf"), 0.5])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 50.0])
def test_the_sum_over_kept_logits(kind: Kind, least: float, temperature: float):
    logits = logits_of(2, 49152)
    row = logits[1].double()
    terms = ((row - row.max()) / temperature).exp()[row >= least]
    found = kind(logits).exp_sum(1, temperature, least)
    assert found == pytest.approx(float(terms.sum()), rel=1e-5)


def test_a_logit_at_the_threshold_counts(kind: Kind):
    logits = torch.tensor([[2.0, 1.0, 0.0, 1.0]])
    expected = 1 + 2 * np.exp(-0.5)
    assert kind(logits).exp_sum(0, 2.0, 1.0) == pytest.approx(expected)
    assert kind(logits).exp_sum(0, 2.0, 1.0001) == pytest.approx(1.0)


def test_selected_rows_are_a_copy(kind: Kind):
    logits = logits_of(4, 100)
    few = kind(logits).select([2])
    before = few.largest([0], 100).tolist()
    logits += 1.0
    assert few.largest([0], 100).tolist() == before

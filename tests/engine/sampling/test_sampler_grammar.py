"""Adjustments of logits: the masks of grammars, stop tokens, and each penalty by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from engine_helpers import generation

from engine.protocol import BadRequest, Structure
from engine.sampling.sampled import Sampled
from engine.sampling.sampler import sample
from engine.scheduling.jobs import Generation


class Matcher:
    """A grammar that allows the same tokens at every position."""

    finished = False

    def __init__(self, *allowed: int, accepts: bool = True) -> None:
        self._allowed = allowed
        self._accepts = accepts
        self.accepted: list[int] = []

    def allowed(self) -> npt.NDArray[np.bool_]:
        mask = np.zeros(4, dtype=np.bool_)
        mask[list(self._allowed)] = True
        return mask

    def accept(self, token: int) -> bool:
        self.accepted.append(token)
        return self._accepts


def sampled(logits: list[float], one: Generation) -> Sampled:
    (result,) = sample(torch.tensor([logits]), [one])
    return result


def drawn(logits: list[float], *, output: list[int] | None = None, **options: Any) -> int:
    return sampled(logits, generation(1, [3], output=output or [], **options)).token


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_drawn(temperature: float):
    for seed in range(10):
        one = generation(1, [1], temperature=temperature, seed=seed)
        one.matcher = matcher = Matcher(1, 3)
        result = sampled([9.0, 0.0, 9.0, 0.5], one)
        assert result.token in ((3,) if temperature == 0.0 else (1, 3))
        assert matcher.accepted == [result.token] and result.failure is None


def test_a_grammar_masks_its_own_row_only():
    one, other = generation(1, [1]), generation(2, [1])
    one.matcher = Matcher(2)
    rows = torch.tensor([[5.0, 1.0, 0.0, 1.0]] * 2)
    assert [item.token for item in sample(rows, [one, other])] == [2, 0]


@pytest.mark.parametrize("param", [None, "guided_regex"])
def test_a_token_that_the_grammar_refuses_is_a_fault_of_the_request(param: str | None):
    structure = (
        {} if param is None else {"structure": Structure(kind="regex", source="a", param=param)}
    )
    one = generation(1, [1], logprobs=2, **structure)
    one.matcher = Matcher(1, accepts=False)
    result = sampled([0.0, 1.0, 2.0, 3.0], one)
    assert isinstance(result.failure, BadRequest)
    assert result.failure.param == param
    assert "grammar" in result.failure.message
    assert result.logprob is None and not result.top


def test_tokens_of_a_grammar_have_logprobs_too():
    one = generation(1, [1], logprobs=1)
    one.matcher = Matcher(1)
    result = sampled([0.0, 1.0, 2.0, 3.0], one)
    assert result.token == 1 and [token for token, _ in result.top] == [3]
    assert result.logprob == pytest.approx(result.top[0][1] - 2.0)


@pytest.mark.parametrize(
    ("allowed", "produced", "expected"),
    [
        ((1, 2), 0, 1),  # 2 stops, and is likelier
        ((1, 2), 1, 1),
        ((1, 2), 2, 2),
        ((1, 2), 3, 2),
        ((2,), 0, 2),  # the grammar allows nothing else: the output ends early
    ],
)
def test_the_least_number_of_tokens_and_the_grammar(
    allowed: tuple[int, ...], produced: int, expected: int
):
    one = generation(1, [1], output=[1] * produced, min_tokens=2, stop_token_ids=[2, 0])
    one.matcher = Matcher(*allowed)
    assert sampled([0.0, 1.0, 9.0, 3.0], one).token == expected


def test_without_a_grammar_no_stop_token_is_drawn_early():
    """Not even if all tokens stop: the first of equals is drawn then."""
    row = [0.0, 1.0, 9.0, 3.0]
    assert drawn(row, min_tokens=2, stop_token_ids=[2]) == 3
    assert drawn(row, min_tokens=2, stop_token_ids=[3, 2]) == 1
    assert drawn(row, min_tokens=2, stop_token_ids=[0, 1, 2, 3]) == 0
    for produced, token in ((1, 3), (2, 2), (3, 2)):
        options = {"min_tokens": 2, "stop_token_ids": [2]}
        assert drawn(row, output=[1] * produced, **options) == token
    assert drawn(row, min_tokens=2) == 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0),
        ({"presence_penalty": 1.5}, 1),
        ({"presence_penalty": -1.0}, 0),
        ({"frequency_penalty": 1.5}, 1),
        ({"frequency_penalty": -1.0}, 0),
        ({"repetition_penalty": 3.0}, 1),
        ({"logit_bias": {1: 1.5}}, 1),
        ({"logit_bias": {2: 3.5}}, 2),
    ],
)
def test_each_adjustment_works_alone(options: dict[str, Any], expected: int):
    assert drawn([2.0, 1.0, -1.0, -5.0], output=[0], **options) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"presence_penalty": -1.5}, 1),  # 1 + 1.5 > 2
        ({"presence_penalty": -0.5}, 0),
        ({"presence_penalty": -1.0}, 0),  # equal: the first
        ({"frequency_penalty": -0.6}, 1),  # 1 + 2·0.6 > 2
        ({"frequency_penalty": -0.4}, 0),
        ({"repetition_penalty": 0.4}, 1),  # 1 / 0.4 > 2
        ({"repetition_penalty": 0.6}, 0),
    ],
)
def test_negative_penalties_favour_what_was_said(options: dict[str, Any], expected: int):
    assert drawn([2.0, 1.0, -1.0, -5.0], output=[1, 1], **options) == expected


def test_logits_may_belong_to_a_graph():
    """Of training, say: sampling takes no gradients."""
    rows = torch.tensor([[0.0, 2.0, 1.0, 0.0]] * 2, requires_grad=True)
    many = [generation(1, [1], logit_bias={2: 5.0}), generation(2, [1], temperature=1.0, top_k=1)]
    assert [item.token for item in sample(rows, many)] == [2, 1]


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_a_penalty_of_minus_one_adds_one(name: str):
    assert drawn([1.5, 1.0, 0.0, 0.0], output=[1], **{name: -1.0}) == 1
    assert drawn([2.5, 1.0, 0.0, 0.0], output=[1], **{name: -1.0}) == 0

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import generation

from engine.sampling.gumbel import Gumbel
from engine.sampling.logits import HostRows
from engine.sampling.sampled import Sampled
from engine.sampling.sampler import sample
from engine.scheduling.jobs import Generation

VOCAB = 40
LARGE = 49152  # SmolLM2's
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "logprobs": 3},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 0.8, "top_k": 50},
    {"temperature": 0.8, "top_k": 5000, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.01, "top_k": 100, "logprobs": 0},
    {"temperature": 2.0, "min_p": 0.001, "top_p": 0.99},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "top_p": 0.9},
    {"temperature": 0.0, "logit_bias": {7: 3.0}, "logprobs": 5},
]


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def draw(logits: torch.Tensor, **sampling: Any) -> int:
    return sample(logits, [generation(1, [1, 2], **sampling)])[0].token


def several(count: int) -> list[Generation]:
    """Return generations of all kinds, each with its own seed and position."""
    return [
        generation(n, [1] * (n + 1), output=[5, 6], seed=n, **KINDS[n % len(KINDS)])
        for n in range(count)
    ]


def test_a_step_without_generations_samples_nothing():
    assert sample(torch.empty(0, VOCAB), []) == []


def test_greedy_takes_the_most_likely_token():
    logits = logits_of(1, rows=5)
    drawn = sample(logits, [generation(i, [1]) for i in range(5)])
    assert [item.token for item in drawn] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("only", [{"top_k": 1}, {"top_p": 0.001}, {"min_p": 1.0}])
def test_with_one_token_left_noise_changes_nothing(only: dict[str, Any]):
    for seed in range(20):
        logits = logits_of(seed)
        assert draw(logits, temperature=1.0, seed=seed, **only) == int(logits.argmax())


def test_a_draw_depends_on_seed_choice_and_position_alone():
    row = logits_of(3)
    one = generation(1, [1, 2, 3], temperature=1.5, seed=7, choice=2)
    (alone,) = sample(row, [one])
    elsewhere = generation(99, [1], output=[2, 3], temperature=1.5, seed=7, choice=2)
    others = [generation(i, [i] * i, temperature=1.0, seed=i) for i in range(1, 6)]
    batch = sample(torch.cat([logits_of(8, rows=5), row]), [*others, elsewhere])
    assert batch[-1] == alone


@pytest.mark.parametrize(
    "other", [{"seed": 8}, {"choice": 3}, {"prompt": [1, 2, 3, 4]}, {"seed": 7 + 2**32}]
)
def test_each_of_seed_choice_and_position_matters(other: dict[str, Any]):
    def draws(**change: Any) -> list[int]:
        options: dict[str, Any] = {"seed": 7, "choice": 2, "temperature": 5.0, **change}
        prompt = options.pop("prompt", [1, 2, 3])
        return [
            sample(logits_of(n), [generation(1, prompt, **options)])[0].token for n in range(12)
        ]

    assert draws() == draws()
    assert draws() != draws(**other)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_is_drawn_as_if_it_were_alone(threads: int):
    """The bits agree in batches of any size and order, on one thread and on two."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows, generations = logits_of(1, 33, LARGE), several(33)
        alone = [sample(rows[n : n + 1], [one])[0] for n, one in enumerate(generations)]
        orders = random.Random(1)
        for count in (2, 3, 7, 8, 16, 31, 33):
            order = orders.sample(range(33), count)
            batch = sample(rows[order], [generations[n] for n in order])
            assert batch == [alone[n] for n in order]
    finally:
        torch.set_num_threads(before)


@pytest.mark.cuda
def test_draws_do_not_depend_on_the_device():
    rows, generations = logits_of(1, 33, LARGE), several(33)
    here, there = sample(rows, generations), sample(rows.cuda(), generations)
    assert [item.token for item in there] == [item.token for item in here]
    for one, other in zip(here, there, strict=True):
        assert other.logprob == pytest.approx(one.logprob)
        assert [token for token, _ in other.top] == [token for token, _ in one.top]


def test_the_token_with_the_highest_score_is_drawn():
    """The pruned search agrees with all scores, in vocabularies of any size."""
    for vocab in (1, 40, 2047, 2048, 2049, 5000, 3 * 2048):
        for temperature in (0.01, 0.5, 1.0, 3.0, 100.0):
            rows = logits_of(vocab, 20, vocab)
            many = [generation(n, [1] * n, temperature=temperature, seed=n) for n in range(20)]
            keys = [(n, 0, n) for n in range(20)]
            noise = Gumbel(keys, vocab).at(np.arange(20)[:, None], np.arange(vocab)[None])
            best = (rows.double().numpy() / temperature + noise).argmax(-1)
            assert [item.token for item in sample(rows, many)] == best.tolist()


def test_filtering_out_other_tokens_does_not_change_a_draw():
    """The noise of a token does not depend on which other tokens pass the filters."""
    row = logits_of(6)
    for seed in range(50):
        token = draw(row, temperature=1.0, seed=seed)
        few = row.clone()
        few[0, torch.arange(VOCAB) % 3 != token % 3] = -torch.inf
        assert draw(few, temperature=1.0, seed=seed) == token


@pytest.mark.parametrize("vocab", [21, 2048 * 3])
def test_draws_are_distributed_as_the_softmax(vocab: int):
    """χ² over 4,000 draws; 20 degrees of freedom exceed 45.3 once in a thousand.

    In the large vocabulary the 21 tokens are spread so that some share a group and some do not.
    """
    some = torch.arange(21) if vocab == 21 else (torch.arange(21) * 1024) % vocab + torch.arange(21)
    row = torch.full((1, vocab), -20.0)
    row[0, some] = logits_of(5, vocab=21)
    draws = 4000
    drawn: list[Sampled] = []
    for begin in range(0, draws, 200):
        many = [generation(1, [0] * n, temperature=0.8, seed=11) for n in range(begin, begin + 200)]
        drawn += sample(row.expand(200, -1), many)
    counts = torch.bincount(torch.tensor([item.token for item in drawn]), minlength=vocab)
    expected = (row[0] / 0.8).softmax(-1)[some] * draws
    statistic = float(((counts[some] - expected) ** 2 / expected).sum())
    assert statistic < 45.3


def test_a_difference_in_the_last_bit_does_not_change_a_draw():
    row = logits_of(9)
    near = row * (1 + 1e-6)
    for seed in range(200):
        assert draw(row, temperature=1.0, seed=seed) == draw(near, temperature=1.0, seed=seed)


def test_the_penalties_and_the_bias_have_their_values():
    """Logprobs are raw, so adjustments show only in the winner; each case is at the threshold."""
    row = torch.zeros(1, 4)
    row[0] = torch.tensor([2.0, 1.0, -1.0, -5.0])
    seen = {"output": [0, 0, 0]}

    def wins(**sampling: Any) -> int:
        return sample(row, [generation(1, [3], **seen, **sampling)])[0].token

    assert wins() == 0
    assert wins(presence_penalty=0.99) == 0  # 2 − 0.99 > 1
    assert wins(presence_penalty=1.01) == 1
    assert wins(frequency_penalty=0.33) == 0  # 2 − 3·0.33 > 1
    assert wins(frequency_penalty=0.34) == 1
    assert wins(presence_penalty=0.5, frequency_penalty=0.16) == 0
    assert wins(presence_penalty=0.5, frequency_penalty=0.17) == 1
    assert wins(repetition_penalty=1.9) == 0  # 2 / 1.9 > 1
    assert wins(repetition_penalty=2.1) == 1
    assert wins(logit_bias={0: -0.99}) == 0
    assert wins(logit_bias={0: -1.01}) == 1
    assert wins(logit_bias={2: 3.01}) == 2
    assert wins(presence_penalty=-2.0, logit_bias={1: 2.99}) == 0  # 2 + 2 > 1 + 2.99


def test_a_repetition_penalty_pushes_negative_logits_further_down():
    row = torch.tensor([[-1.0, -1.5]])
    assert sample(row, [generation(1, [0], repetition_penalty=1.4)])[0].token == 0
    assert sample(row, [generation(1, [0], repetition_penalty=1.6)])[0].token == 1


def test_the_openai_penalties_spare_the_prompt():
    row = torch.tensor([[2.0, 1.0]])
    assert draw(row, presence_penalty=2.0, frequency_penalty=2.0) == 0


def test_logits_are_left_as_they_are():
    row = logits_of(2)
    before = row.clone()
    draw(row, temperature=0.7, top_k=3, top_p=0.5, logit_bias={1: 5.0}, repetition_penalty=2.0)
    assert torch.equal(row, before)


def test_min_tokens_delays_the_end():
    row = torch.zeros(1, 4)
    row[0, 2] = 9.0
    for output, token in (([], 0), ([1], 0), ([1, 1], 2)):
        one = generation(1, [1], output=output, min_tokens=2, stop_token_ids=[2])
        assert sample(row, [one])[0].token == token


def test_logprobs_are_of_the_raw_logits():
    row = logits_of(4)
    item = sample(row, [generation(1, [1], logprobs=3, logit_bias={5: 100.0})])[0]
    expected = row[0].log_softmax(-1)
    assert item.token == 5
    assert item.logprob == pytest.approx(float(expected[5]))
    assert [token for token, _ in item.top] == row[0].topk(3).indices.tolist()
    assert [value for _, value in item.top] == pytest.approx(expected.topk(3).values.tolist())


def test_logprobs_only_where_asked_for():
    none, zero = sample(logits_of(4, rows=2), [generation(1, [1]), generation(2, [1], logprobs=0)])
    assert none.logprob is None and not none.top
    assert zero.logprob is not None and not zero.top


@pytest.mark.parametrize("kind", [one for one in KINDS if not one.get("logit_bias")])
def test_a_row_without_finite_logits_does_not_affect_others(kind: dict[str, Any]):
    rows = logits_of(6, 3)
    broken = [rows.clone(), rows.clone()]
    broken[0][1], broken[1][1] = -torch.inf, torch.nan
    many = [generation(n, [1], **{**kind, "seed": n}) for n in range(3)]
    expected = sample(rows, many)
    for with_one in broken:
        drawn = sample(with_one, many)
        assert (drawn[0], drawn[2]) == (expected[0], expected[2])
        assert drawn[1].token == 0


def test_below_a_hundred_thousandth_of_a_degree_no_noise_is_added():
    """At it, noise still decides between equal logits."""
    row = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    at = {draw(row, temperature=1e-5, seed=seed) for seed in range(30)}
    assert at == {1, 2, 3}
    assert {draw(row, temperature=0.99e-5, seed=seed) for seed in range(30)} == {1}


def test_a_last_bit_of_noise_does_not_lose_the_winner(monkeypatch: pytest.MonkeyPatch):
    """A logarithm may be rounded otherwise at another place of an array."""
    at, calls = Gumbel.at, []

    def rounded_up_at_first(self: Gumbel, draws: Any, tokens: Any) -> Any:
        noise = at(self, draws, tokens)
        calls.append(noise.shape)
        return np.nextafter(noise, np.inf) if len(calls) % 2 else noise

    for seed in range(40):
        row = logits_of(seed)
        expected = draw(row, temperature=1.5, seed=seed)
        with monkeypatch.context() as patch:
            patch.setattr(Gumbel, "at", rounded_up_at_first)
            assert draw(row, temperature=1.5, seed=seed) == expected
    assert len(calls) == 80


@pytest.mark.parametrize("options", [{}, {"top_k": 20}, {"top_p": 0.01}, {"min_p": 0.5}])
def test_a_draw_looks_at_few_tokens(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]):
    """Of tens of thousands: scores would take most of the time of a draw."""
    at, scored = HostRows.at, []

    def counted(self: HostRows, rows: Any, tokens: Any) -> Any:
        scored.append(tokens.size)
        return at(self, rows, tokens)

    monkeypatch.setattr(HostRows, "at", counted)
    rows = logits_of(5, rows=20, vocab=LARGE) / 4 - 50
    many = [generation(n, [1] * n, temperature=1.0, seed=n, **options) for n in range(20)]
    sample(rows, many)
    members = -(-LARGE // 2048)
    first, rest = scored
    assert first == 20 * 8 * members
    assert rest < 20 * 100 * members  # of 2048 groups, at most 100 for each draw

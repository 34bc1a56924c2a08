from __future__ import annotations

import math

import pytest
import torch
from engine_helpers import generation
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import Sampling
from engine.sampler import _filtered, _uniform, sample

VOCAB = 40


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def draw(logits: torch.Tensor, **sampling: object) -> int:
    return sample(logits, [generation(1, [1, 2], **sampling)])[0].token


def naive_mask(row: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that may be drawn: min_p, then top_k, then top_p of what is left."""
    total = math.fsum(math.exp(x) for x in row)
    p = {i: math.exp(x) / total for i, x in enumerate(row)}
    most = max(p.values())
    kept = {i for i, x in p.items() if x >= min_p * most}
    if top_k:
        kept = set(sorted(kept, key=lambda i: -p[i])[:top_k])
    rest = math.fsum(p[i] for i in kept)
    before, out = 0.0, set()
    for i in sorted(kept, key=lambda i: -p[i]):
        if before < top_p:
            out.add(i)
        before += p[i] / rest
    return out


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0, 1, 2, 7, 39, 40, 100]),
    st.sampled_from([0.01, 0.3, 0.7, 0.95, 1.0]),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_the_masks_are_the_naive_ones(seed: int, top_k: int, top_p: float, min_p: float):
    row = logits_of(seed)[0]
    sampling = Sampling(top_k=top_k, top_p=top_p, min_p=min_p)
    kept = set(torch.isfinite(_filtered(row, sampling)).nonzero().flatten().tolist())
    assert kept == naive_mask(row.double().tolist(), top_k, top_p, min_p)
    assert int(row.argmax()) in kept


def test_greedy_takes_the_likeliest():
    logits = logits_of(1, rows=5)
    drawn = sample(logits, [generation(i, [1]) for i in range(5)])
    assert [item.token for item in drawn] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("only", [{"top_k": 1}, {"top_p": 0.001}, {"min_p": 1.0}])
def test_with_one_token_left_noise_changes_nothing(only: dict[str, float]):
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
def test_each_of_seed_choice_and_position_matters(other: dict[str, object]):
    def draws(**change: object) -> list[int]:
        options: dict[str, object] = {"seed": 7, "choice": 2, "temperature": 5.0, **change}
        prompt = options.pop("prompt", [1, 2, 3])
        return [
            sample(logits_of(n), [generation(1, prompt, **options)])[0].token  # type: ignore[arg-type]
            for n in range(12)
        ]

    assert draws() == draws()
    assert draws() != draws(**other)


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**53 + 1, 2**63, 2**64 - 1])
def test_every_seed_that_the_protocol_allows_is_its_own(seed: int):
    near = seed - 1 if seed == 2**64 - 1 else seed + 1
    uniform = _uniform(Sampling(seed=seed), 5, VOCAB)
    assert ((uniform > 0) & (uniform < 1)).all()
    assert (uniform != _uniform(Sampling(seed=near), 5, VOCAB)).any()


def test_the_largest_choice_and_position_work():
    uniform = _uniform(Sampling(seed=1, choice=2**31 - 1), 2**20, VOCAB)
    assert ((uniform > 0) & (uniform < 1)).all()


@pytest.mark.parametrize("top_p", [0.001, 0.5, 0.9, 0.999999])
def test_a_nucleus_is_the_same_wherever_it_is_looked_for(
    top_p: float, monkeypatch: pytest.MonkeyPatch
):
    rows = [*logits_of(4, rows=3), logits_of(5)[0] * 10, torch.zeros(VOCAB)]
    expected = [_filtered(row, Sampling(top_p=top_p)) for row in rows]
    monkeypatch.setattr("engine.sampler.LIKELY", 3)
    for row, kept in zip(rows, expected, strict=True):
        found = _filtered(row, Sampling(top_p=top_p))
        assert found.isfinite().sum() == kept.isfinite().sum()
        assert row is rows[-1] or torch.equal(found, kept)  # of equals any will do


def test_a_draw_among_few_is_the_one_among_all_if_it_is_theirs():
    """Noise belongs to a token: leaving others out does not change it."""
    row = logits_of(6)
    for seed in range(50):
        token = draw(row, temperature=1.0, seed=seed)
        few = row.clone()
        few[0, torch.arange(VOCAB) % 3 != token % 3] = -torch.inf
        assert draw(few, temperature=1.0, seed=seed) == token


def test_draws_are_distributed_as_the_softmax():
    """χ² over 4,000 draws; 20 degrees of freedom exceed 45.3 once in a thousand."""
    row = logits_of(5, vocab=21)
    draws = 4000
    many = [generation(1, [0] * (n + 1), temperature=0.8, seed=11) for n in range(draws)]
    drawn = sample(row.expand(draws, -1), many)
    counts = torch.bincount(torch.tensor([item.token for item in drawn]), minlength=21)
    expected = (row[0] / 0.8).softmax(-1) * draws
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < 45.3


def test_a_last_bit_does_not_change_a_draw():
    row = logits_of(9)
    near = row * (1 + 1e-6)
    for seed in range(200):
        assert draw(row, temperature=1.0, seed=seed) == draw(near, temperature=1.0, seed=seed)


def test_the_penalties_and_the_bias_have_their_values():
    """Logprobs are raw, so the adjusted logits show only in what wins; each case is on the edge."""
    row = torch.zeros(1, 4)
    row[0] = torch.tensor([2.0, 1.0, -1.0, -5.0])
    seen = {"output": [0, 0, 0]}

    def wins(**sampling: object) -> int:
        return sample(row, [generation(1, [3], **seen, **sampling)])[0].token  # type: ignore[arg-type]

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


def test_min_tokens_hold_the_end_back():
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
    assert none.logprob is None and none.top == []
    assert zero.logprob is not None and zero.top == []

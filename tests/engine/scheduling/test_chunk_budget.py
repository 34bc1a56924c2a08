"""The chunk budget, over simulated engines whose step times the tests define."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from engine.scheduling.chunk_budget import MIN_TOKENS, PROBE_EVERY, PROBES, ChunkBudget

BUDGET = 512
Cost = Callable[[int, int], float]  # (decodes, prompt tokens) -> seconds


def linear(decodes: int, tokens: int) -> float:
    """8 ms per step, 1 ms per decode, 0.4 ms per prompt token."""
    return (8 + decodes + 0.4 * tokens) / 1e3


def learn(budget: ChunkBudget, decodes: int, cost: Cost = linear, *, steps: int = 5) -> None:
    """Record a step with a prompt alone, then `steps` steps with decodes alone."""
    budget.record(0, BUDGET, cost(0, BUDGET))
    for _ in range(steps):
        budget.record(decodes, 0, cost(decodes, 0))


def run(budget: ChunkBudget, decodes: int, steps: int, cost: Cost = linear) -> list[int]:
    """Run steps with endless prompts; return the prompt tokens of each step."""
    taken = []
    for _ in range(steps):
        tokens = budget.tokens_allowed(decodes, 1, BUDGET)
        budget.record(decodes, tokens, cost(decodes, tokens))
        taken.append(tokens)
    return taken


def test_steps_take_the_allowed_slowdown():
    budget = ChunkBudget(1.75)
    learn(budget, 16)
    for tokens in run(budget, 16, 200)[10:]:
        assert tokens == 0 or linear(16, tokens) == pytest.approx(1.75 * linear(16, 0), rel=0.02)


def test_more_waiting_prompts_than_decodes_get_proportionally_more_time():
    budget = ChunkBudget(1.5)
    learn(budget, 8)
    run(budget, 8, 60)  # uses up the probes
    alone, cost = linear(8, 0), linear(8, 1) - linear(8, 0)
    assert budget.tokens_allowed(8, 8, BUDGET) == pytest.approx(0.5 * alone / cost, abs=2)
    assert budget.tokens_allowed(8, 16, BUDGET) == pytest.approx(2 * alone / cost, abs=2)
    assert budget.tokens_allowed(8, 10**6, BUDGET) == BUDGET


def test_without_a_slowdown_the_budget_is_all():
    budget = ChunkBudget(0.0)
    learn(budget, 16)
    assert set(run(budget, 16, 100)) == {BUDGET}


def test_without_decodes_the_budget_is_all():
    budget = ChunkBudget(1.5)
    learn(budget, 16)
    assert budget.tokens_allowed(0, 1, BUDGET) == BUDGET


def test_without_measurements_two_decode_steps_are_measured():
    budget = ChunkBudget(2.0)
    assert run(budget, 4, 3) == [0, 0, MIN_TOKENS]  # then the cost of a token is measured
    assert run(budget, 4, 5)[-1] == pytest.approx(30, abs=1)


def test_prompts_without_cost_take_the_whole_budget():
    budget = ChunkBudget(1.5)
    taken = run(budget, 4, 10, lambda decodes, tokens: 0.02)
    assert taken == [0, 0, MIN_TOKENS, *[BUDGET] * 7]


def test_slow_prompts_always_progress():
    budget = ChunkBudget(1.1)
    learn(budget, 2, lambda decodes, tokens: 0.001 + tokens)
    assert set(run(budget, 2, 50, lambda decodes, tokens: 0.001 + tokens)) == {MIN_TOKENS}


def test_the_remaining_budget_is_never_exceeded():
    budget = ChunkBudget(1.1)
    learn(budget, 2)
    assert budget.tokens_allowed(2, 1, 3) == 3


def test_probes_are_rare_but_happen():
    budget = ChunkBudget(1.75)
    taken = run(budget, 16, 100 * PROBE_EVERY)
    assert 50 <= taken.count(0) <= 100 + PROBES
    assert taken.count(0) / len(taken) < 0.02
    probes = [step for step, tokens in enumerate(taken) if not tokens][2:]
    assert min(b - a for a, b in pairwise(probes)) > 32  # probes are spread over time


def test_probes_are_rare_also_with_a_changing_batch():
    budget, draw = ChunkBudget(1.75), random.Random(1)
    taken = [run(budget, draw.choice((1, 4, 16, 64)), 1)[0] for _ in range(10_000)]
    assert taken.count(0) / len(taken) < 0.02


def test_a_larger_batch_is_measured_at_once():
    budget = ChunkBudget(2.0)
    learn(budget, 2)
    assert run(budget, 2, 5)[-1] == pytest.approx(25, abs=1)
    assert run(budget, 16, 5) == [0, 0, *[pytest.approx(60, abs=6)] * 3]


def test_a_batch_smaller_than_any_measured_is_estimated_by_its_share():
    budget = ChunkBudget(2.0)
    learn(budget, 16)
    for _ in range(PROBES):
        budget.tokens_allowed(99, 1, BUDGET)  # uses up the probes
    assert budget.tokens_allowed(8, 1, BUDGET) == int(12 / 0.4 / (1 + 8 / 0.4 / BUDGET))


def test_the_cost_per_token_is_followed_within_a_few_steps():
    """Deep in a prompt, tokens cost three times as much; then the next prompt begins."""
    budget = ChunkBudget(1.75)
    learn(budget, 16)
    run(budget, 16, 20)

    def deep(decodes: int, tokens: int) -> float:
        return linear(decodes, 3 * tokens)

    slow = [deep(16, tokens) / deep(16, 0) for tokens in run(budget, 16, 10, deep)]
    assert max(slow[4:]) < 1.85
    fast = [linear(16, tokens) / linear(16, 0) for tokens in run(budget, 16, 10)]
    assert min(fast[6:]) > 1.7


@pytest.mark.parametrize("outlier", [0.1, 10.0])
def test_an_outlier_is_soon_forgotten(outlier: float):
    budget = ChunkBudget(1.75)
    learn(budget, 16)
    usual = run(budget, 16, 20)[-1]
    budget.record(16, usual, linear(16, usual) + outlier)  # in a step with prompt tokens
    assert usual / 3 < budget.tokens_allowed(16, 1, BUDGET) < usual
    assert run(budget, 16, 8)[-1] == pytest.approx(usual, rel=0.1)
    budget.record(16, 0, linear(16, 0) + outlier)  # in a step without prompt tokens
    assert budget.tokens_allowed(16, 1, BUDGET) == pytest.approx(usual, rel=0.1)


@pytest.mark.parametrize("outlier", [0.1, 10.0])
def test_an_outlier_in_the_first_step_is_ignored(outlier: float):
    budget = ChunkBudget(1.75)
    budget.record(0, BUDGET, linear(0, BUDGET))
    budget.record(16, 0, linear(16, 0) + outlier)
    ratios = [linear(16, tokens) / linear(16, 0) for tokens in run(budget, 16, 40)]
    assert max(ratios) < 1.8


def test_a_short_slowdown_of_the_machine_is_ignored():
    budget = ChunkBudget(1.75)
    learn(budget, 16, steps=30)
    usual = run(budget, 16, 10)[-1]
    for _ in range(20):
        budget.record(16, 0, 5 * linear(16, 0))
    assert budget.tokens_allowed(16, 1, BUDGET) == pytest.approx(usual, rel=0.05)


def test_a_lasting_slowdown_of_decodes_is_followed():
    """Decodes slow down as contexts grow or other programs use the machine."""
    budget = ChunkBudget(1.75)
    learn(budget, 16)

    def slow(decodes: int, tokens: int) -> float:
        return 2 * linear(decodes, tokens)

    tokens = run(budget, 16, 6 * PROBE_EVERY, slow)[-1]
    assert slow(16, tokens) == pytest.approx(1.75 * slow(16, 0), rel=0.05)

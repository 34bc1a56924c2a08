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


@pytest.mark.parametrize(("decodes", "ms"), [(1, 31), (2, 32), (8, 38), (12, 42), (40, 70)])
def test_a_batch_that_was_not_measured_lately_is_on_a_line_through_the_others(decodes, ms):
    budget = ChunkBudget(2.0)
    budget.record(0, 100, 0.1)  # a token costs 1 ms
    for batch in (4, 4, 16, 16) * 2:
        budget.record(batch, 0, 0.030 + 0.001 * batch)
    assert allowed(budget, decodes) == pytest.approx(ms, abs=1)


def test_a_slow_step_bends_the_line_little():
    budget = ChunkBudget(2.0)
    budget.record(0, 100, 0.1)
    for batch in (4, 16) * 20:
        budget.record(batch, 0, 0.030 + 0.001 * batch)
    budget.record(16, 0, 3.0)
    assert allowed(budget, 2) == pytest.approx(32, abs=1)
    assert allowed(budget, 40) == pytest.approx(70, abs=2)


def test_chunks_of_a_quickly_changing_batch_do_not_shrink_to_the_least():
    """Half a share of the time of the last batch that was measured would be far too little."""
    budget, source = ChunkBudget(1.5), random.Random(4)
    taken = []
    for number in range(600):
        decodes = source.choice((1, 2, 3, 5, 8))
        tokens = budget.tokens_allowed(decodes, 1, BUDGET) if number % 3 else 0
        ms = 30 + decodes + 0.25 * tokens + (2.5 if tokens else 0)
        budget.record(decodes, tokens, ms * source.gauss(1, 0.04) / 1e3)
        taken.append(tokens)
    prompts = sorted(tokens for tokens in taken[200:] if tokens)
    assert prompts[len(prompts) // 10] > 20


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


# Exact values: an ms per prompt token, and a slowdown of 2 gives prompts as long as the decodes


def per_token_ms() -> ChunkBudget:
    """Return a budget that has measured a cost of 1 ms per prompt token."""
    budget = ChunkBudget(2.0)
    budget.record(0, 100, 0.1)
    return budget


def allowed(budget: ChunkBudget, decodes: int, waiting: int = 1) -> int:
    """Return the tokens for a step that is no probe."""
    for _ in range(PROBES):
        budget.tokens_allowed(10**6, 1, BUDGET)  # uses up the probes
    return budget.tokens_allowed(decodes, waiting, BUDGET)


def test_a_budget_sets_no_limit_unless_it_is_told_to():
    budget = ChunkBudget()
    budget.record(3, 0, 0.1)
    assert budget.tokens_allowed(3, 1, BUDGET) == BUDGET


def test_four_probes_follow_each_other_at_most():
    assert PROBES == 4
    budget = ChunkBudget(2.0)
    probes = [not budget.tokens_allowed(10**n, 1, BUDGET) for n in range(6)]
    assert probes == [True] * 4 + [False] * 2


def test_after_64_prompt_steps_there_is_another_probe():
    assert PROBE_EVERY == 64
    budget = ChunkBudget(2.0)
    assert allowed(budget, 1) == MIN_TOKENS == 4
    for _ in range(63):
        budget.record(0, 100, 0.1)
    assert budget.tokens_allowed(1, 1, BUDGET)
    budget.record(0, 100, 0.1)
    assert budget.tokens_allowed(1, 1, BUDGET) == 0
    assert budget.tokens_allowed(1, 1, BUDGET)
    for _ in range(10 * 64):  # probes are saved up, but four at most
        budget.record(0, 100, 0.1)
    assert [budget.tokens_allowed(1, 1, BUDGET) == 0 for _ in range(5)] == [True] * 4 + [False]


def test_steps_without_prompts_give_no_probe():
    budget = ChunkBudget(2.0)
    allowed(budget, 1)
    for _ in range(100):
        budget.record(1, 0, 0.01)
    assert budget.tokens_allowed(10**6, 1, BUDGET)


@pytest.mark.parametrize(("decodes", "similar"), [(63, 0), (64, 1), (80, 1), (100, 1), (101, 0)])
def test_batches_within_a_quarter_are_similar(decodes: int, similar: bool):
    budget = per_token_ms()
    for _ in range(2):
        budget.record(80, 0, 0.1)
    assert bool(budget.tokens_allowed(decodes, 1, BUDGET)) == similar


def test_the_latest_measurement_must_be_recent():
    budget = per_token_ms()
    for _ in range(3):
        budget.record(8, 0, 0.0105)
    for _ in range(40):
        budget.record(0, 100, 0.1)
    budget.record(8, 0, 0.0105)
    for _ in range(63):
        budget.record(0, 100, 0.1)
    assert budget.tokens_allowed(8, 1, BUDGET) == 10
    budget.record(0, 100, 0.1)
    assert budget.tokens_allowed(8, 1, BUDGET) == 0
    assert allowed(budget, 8) == 10  # but it is better than none


@pytest.mark.parametrize("count", [1, 5, 100])
def test_equal_steps_together_teach_what_they_teach_one_by_one(count: int):
    together, alone = per_token_ms(), per_token_ms()
    times = [random.Random(number).uniform(0.01, 0.02) for number in range(count)]
    for _ in range(2):
        together.record_decodes(8, times)
        for seconds in times:
            alone.record(8, 0, seconds)
        together.record(8, 100, 0.2)
        alone.record(8, 100, 0.2)
    for decodes in (8, 9, 12, 3, 8):
        for _ in range(70):  # also when the measurements age
            allowed_now = together.tokens_allowed(decodes, 1, BUDGET)
            assert allowed_now == alone.tokens_allowed(decodes, 1, BUDGET)
            for budget in (together, alone):
                budget.record(decodes, allowed_now, 0.05)


def test_a_single_measurement_is_not_enough():
    budget = per_token_ms()
    budget.record(8, 0, 0.0105)
    assert budget.tokens_allowed(8, 1, BUDGET) == 0


def test_a_measurement_is_dropped_after_160_steps():
    budget = per_token_ms()
    budget.record(8, 0, 0.0055)
    for _ in range(98):
        budget.record(0, 100, 0.1)
    budget.record(8, 0, 0.0105)
    for _ in range(60):
        budget.record(0, 100, 0.1)
    assert allowed(budget, 8) == 5  # the lower one
    budget.record(0, 100, 0.1)
    assert allowed(budget, 8) == 10


def test_the_lower_quartile_of_the_measurements_counts():
    budget = per_token_ms()
    for count, (ms, expected) in enumerate(
        [(85.5, 85), (55.5, 55), (65.5, 55), (75.5, 55), (95.5, 65), (25.5, 55), (15.5, 25)]
    ):
        budget.record(8, 0, ms / 1000)
        assert allowed(budget, 8) == expected, count


def test_the_latest_32_measurements_count():
    budget = per_token_ms()
    for ms in [95.5] * 25 + [25.5] * 8:
        budget.record(8, 0, ms / 1000)
    assert allowed(budget, 8) == 25  # eight of 32 are the lower quartile, eight of 33 would not be
    for ms in [95.5] * 24:
        budget.record(8, 0, ms / 1000)
    assert allowed(budget, 8) == 25
    budget.record(8, 0, 0.0955)
    assert allowed(budget, 8) == 95


@pytest.mark.parametrize(
    ("decodes", "expected"), [(1, 4), (4, 5), (8, 10), (10, 10), (16, 10), (1000, 10)]
)
def test_an_unknown_batch_takes_its_share_of_the_measured_time(decodes: int, expected: int):
    budget = per_token_ms()
    for _ in range(2):
        budget.record(8, 0, 0.0105)
    assert allowed(budget, decodes) == expected


@pytest.mark.parametrize(
    ("waiting", "expected"), [(1, 10), (8, 10), (9, 11), (16, 20), (80, 104), (10**6, BUDGET)]
)
def test_prompts_get_more_time_the_more_of_them_wait(waiting: int, expected: int):
    budget = per_token_ms()
    for _ in range(2):
        budget.record(8, 0, 0.01047)
    assert allowed(budget, 8, waiting) == expected


@pytest.mark.parametrize(
    ("tokens", "seconds", "expected"),
    [
        (20, 0.0305, 10),  # as expected: 20 ms beyond the decodes
        (20, 0.0405, 9),  # 30 ms
        (20, 10.0, 8),  # counts as twice the expected 20 ms
        (2, 10.0, 9),  # counts as the decodes' own time, which is more than twice the expected
        (20, 0.0105, 14),  # no more than the decodes alone
        (20, 0.001, 14),  # less than the decodes alone
    ],
)
def test_a_measured_cost_counts_half_as_much_in_each_step(
    tokens: int, seconds: float, expected: int
):
    budget = per_token_ms()
    for _ in range(2):
        budget.record(8, 0, 0.0105)
    budget.record(8, tokens, seconds)
    assert allowed(budget, 8) == expected
    budget.record(0, 100, 0.1)
    budget.record(0, 100, 0.1)
    assert allowed(budget, 8) == 10


def test_without_decodes_a_slow_step_counts_in_full():
    budget = per_token_ms()
    for _ in range(2):
        budget.record(8, 0, 0.01047)
    budget.record(0, 50, 0.45)  # 50 ms and 450 ms for 100 tokens
    assert allowed(budget, 8) == MIN_TOKENS
    assert allowed(budget, 8, 80) == 20


@pytest.mark.parametrize(("waiting", "expected"), [(1, 5), (6, 5), (8, 5), (9, 11)])
def test_fewer_waiting_prompts_than_decodes_get_the_slowdowns_time(waiting: int, expected: int):
    budget = ChunkBudget(1.5)
    budget.record(0, 100, 0.1)
    for _ in range(2):
        budget.record(8, 0, 0.0105)
    assert allowed(budget, 8, waiting) == expected


def test_the_last_tokens_of_a_prompt_hardly_change_the_cost_of_a_token():
    """A step with a single prompt token takes 3 ms longer than its decodes."""
    budget = ChunkBudget(1.75)
    learn(budget, 16)
    usual = run(budget, 16, 20)[-1]
    for _ in range(5):
        budget.tokens_allowed(16, 1, BUDGET)
        budget.record(16, 1, linear(16, 0) + 3e-3)
    assert budget.tokens_allowed(16, 1, BUDGET) == pytest.approx(usual, rel=0.1)


def test_one_step_of_a_batch_is_no_evidence_beside_two_of_another():
    budget = per_token_ms()
    for decodes, ms in ((2, 500.5), (4, 20.5), (4, 20.5)):
        budget.record(decodes, 0, ms / 1000)
    assert allowed(budget, 8) == 20


def test_prompts_do_not_wait_for_a_lone_decode_that_is_much_faster_than_two():
    """Two and more rows take four times as long as one, as products in float32 of bfloat16 do."""

    def cost(decodes: int, tokens: int) -> float:
        return 0.012 if decodes + tokens == 1 else (48 + 0.8 * (decodes + tokens)) / 1e3

    budget = ChunkBudget(1.5)
    learn(budget, 2, cost)
    learn(budget, 1, cost)
    assert run(budget, 1, 30, cost)[-1] == pytest.approx(0.5 * cost(2, 0) / 0.8e-3, abs=3)


def serve_prompts(chunk_ms: float, token_ms: float, scatter: float, deep_ms: float = 0.0):
    """Serve prompts of 400 tokens, one by one, beside 16 decodes that take 30 ms.

    A token takes `deep_ms` more for each token before it. Returns, of each of the later steps, the
    prompt tokens, and how many times as long as its decodes it takes without scatter.
    """
    budget, source, left = ChunkBudget(1.75), random.Random(1), 400
    budget.record(0, 200, (15 + chunk_ms + 200 * token_ms) / 1e3)
    steps = []
    for _ in range(2000):
        tokens = min(budget.tokens_allowed(16, 1, BUDGET), left)
        prompt_ms = tokens * (token_ms + deep_ms * (400 - left)) + (chunk_ms if tokens else 0)
        budget.record(16, tokens, (30 + prompt_ms) * source.gauss(1, scatter) / 1e3)
        left = left - tokens or 400
        if tokens:
            steps.append((tokens, 1 + prompt_ms / 30))
    return steps[500:]


@pytest.mark.parametrize("scatter", [0, 0.04])
@pytest.mark.parametrize("chunk_ms", [0, 3, 6])
def test_the_cost_of_a_chunk_is_part_of_the_slowdown(chunk_ms: float, scatter: float):
    times = sorted(times for _, times in serve_prompts(chunk_ms, 0.3, scatter))
    assert times[len(times) // 2] == pytest.approx(1.72, abs=0.05)
    assert times[-1] < 2


@pytest.mark.parametrize("scatter", [0, 0.04])
@pytest.mark.parametrize("chunk_ms", [22, 45, 100])
def test_a_chunk_that_costs_more_than_prompts_may_take_has_many_tokens(
    chunk_ms: float, scatter: float
):
    """With a cost per token alone, these would be the least tokens, for hundreds of steps."""
    steps = serve_prompts(chunk_ms, 0.45, scatter)
    tokens = sorted(tokens for tokens, _ in steps)
    assert tokens[len(tokens) // 2] > 4 * MIN_TOKENS
    assert max(times for _, times in steps) < 1.2 * (1 + (chunk_ms + 0.75 * 30) / 30)


@pytest.mark.parametrize("scatter", [0, 0.04])
def test_deep_tokens_are_not_taken_for_the_cost_of_a_chunk(scatter: float):
    """Deep in a prompt, fewer tokens take as long: their times alone are all about the same."""
    times = sorted(times for _, times in serve_prompts(0, 0.25, scatter, deep_ms=0.001))
    assert times[len(times) * 9 // 10] < 2
    assert times[-1] < 2.4

"""DéjàVu's planner gives the paper's tables, and its simulator the closed forms."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.latency import MODELS, StepWork, find_profile
from engine.protocol import BadRequest
from router.planning import (
    Job,
    Microbatch,
    balanced_split,
    colocated,
    colocated_s,
    data_parallel,
    disaggregated,
    disaggregation_wins,
    least_machines,
    plan_split,
    streaming_overhead,
    swapping_helps,
)

PROMPT, TOKENS = 1000, 115  # the mean of the paper's LMSys trace
GB = 1e9


def opt66(profile: str, batch: int) -> tuple[float, float]:
    """Prompt and token time of a microbatch with DistServe's coefficients."""
    step = find_profile(profile).step
    prompt = step.seconds(StepWork(batch * PROMPT, batch * PROMPT**2))
    context = batch * (PROMPT + TOKENS // 2)
    return prompt, step.seconds(StepWork(decodes=batch, context=context))


TABLE_2 = {6: (2, 4), 8: (3, 5), 10: (4, 6), 12: (5, 7), 14: (5, 9), 16: (6, 10)}
TABLE_3 = {machines: (machines // 2, machines // 2) for machines in range(2, 17, 2)}


@pytest.mark.parametrize(
    ("profile", "batch", "table"),
    [("opt-66b@a100:tp2", 16, TABLE_2), ("opt-66b@a100:tp4", 32, TABLE_3)],
)
def test_the_splits_of_tables_2_and_3(profile, batch, table):
    times = opt66(profile, batch)
    found = {}
    for machines in table:
        prompt, token = balanced_split(machines, *times, TOKENS)
        assert prompt + token == pytest.approx(machines)
        found[machines] = (round(prompt), machines - round(prompt))
    assert found == table


# Machine memory, GB of KV per token, layers, GB of weights; and (machines for prompts, microbatch),
# (machines for tokens, microbatch) by the number of machines.
MEMORY = {
    2: (160, 0.00236, 64, 132, {
        2: (1, 4, 1, 4), 4: (2, 2, 2, 2), 6: (2, 16, 4, 16), 8: (3, 16, 5, 16), 10: (4, 16, 6, 16),
        12: (5, 16, 7, 16), 14: (5, 16, 9, 16), 16: (6, 16, 10, 16),
    }),
    3: (320, 0.00236, 64, 132, {n: (n // 2, 32, n // 2, 32) for n in range(2, 17, 2)}),
    4: (64, 0.001375, 48, 60, {
        4: (2, 8, 2, 8), 6: (2, 16, 4, 16), 8: (3, 16, 5, 16), 10: (4, 16, 6, 16),
        12: (5, 16, 7, 16), 14: (6, 16, 8, 16), 16: (7, 16, 9, 16),
    }),
    5: (320, 0.004, 70, 352, {
        4: (2, 16, 2, 16), 6: (3, 16, 3, 16), 8: (4, 16, 4, 16), 10: (5, 16, 5, 16),
        12: (6, 32, 6, 32), 14: (8, 32, 6, 32), 16: (10, 32, 6, 32),
    }),
}  # fmt: skip


def microbatch(table: int, batch: int) -> tuple[Microbatch, float]:
    machine, per_token, layers, weights, _ = MEMORY[table]
    kv = batch * per_token * GB / layers
    whole = Microbatch(
        layers, weights * GB / layers, PROMPT * kv, TOKENS * kv, 4.0, 0.05, TOKENS
    )  # fmt: skip
    return whole, machine * GB


@pytest.mark.parametrize("table", MEMORY)
def test_the_memory_of_every_entry_of_tables_2_to_5(table):
    for prompt, prompt_batch, token, token_batch in MEMORY[table][4].values():
        least_prompt, _ = least_machines(*microbatch(table, prompt_batch))
        _, least_token = least_machines(*microbatch(table, token_batch))
        assert least_prompt <= prompt and least_token <= token


@pytest.mark.parametrize(("table", "batch"), [(4, 4), (4, 8), (5, 1), (5, 8)])
def test_where_the_tables_have_no_entry_two_machines_are_short(table, batch):
    """One machine holds neither BLOOM-176B nor OPT-30B with the KV of such a microbatch."""
    with pytest.raises(BadRequest, match=r"machines: prompts need .* and there are 2"):
        plan_split(2, *microbatch(table, batch), 5e9)


@given(st.integers(0, 10**6))
def test_the_bounds_are_the_least_depths_whose_stages_fit(seed):
    """Against layers dealt out one by one."""
    source = random.Random(seed)
    layers = source.randint(1, 12)
    sizes = [source.randint(1, 10) for _ in range(3)]
    batch = Microbatch(layers, *sizes, 1.0, 0.1, 10)
    memory = source.randint(5, 150)

    def fits(depth: int, per_layer: float, fixed: float) -> bool:
        stages = [0] * depth
        for layer in range(layers):
            stages[layer % depth] += 1
        return max(stages) * per_layer + fixed <= memory

    weights, prompt_kv, token_kv = sizes
    prompt = next((n for n in range(1, layers + 1) if fits(n, weights + prompt_kv, 0)), None)
    fixed = layers * (prompt_kv + token_kv)
    token = next((n for n in range(1, layers + 1) if fits(n, weights, fixed)), None)
    assert least_machines(batch, memory) == (prompt, token)


BLOOM = MODELS["bloom-176b"]
TABLE_6 = {
    100: (0.856, 0), 80: (1.07, 0), 60: (1.43, 0), 40: (2.14, 0), 20: (4.28, 1.18),
    10: (8.56, 5.46), 1: (85.6, 82.5),
}  # fmt: skip


@pytest.mark.parametrize("gbps", TABLE_6)
def test_table_6(gbps):
    """10.7 GB per microbatch and prompt stage: 8 requests of 1000 tokens, three stages."""
    kv = BLOOM.kv_bytes_per_token * 8 * 1000 / 3
    assert kv == pytest.approx(10.7e9, rel=1e-3)
    transfer = kv / (gbps * GB / 8)
    shown, extra = TABLE_6[gbps]
    assert transfer == pytest.approx(shown, rel=5e-3)
    assert 3.1 * (streaming_overhead(transfer, 3.1) - 1) == pytest.approx(extra, rel=5e-3)


@pytest.mark.parametrize(("gbps", "least_ratio"), [(40, 1.0), (20, 1.80), (10, None), (1, None)])
def test_equation_5_for_table_6(gbps, least_ratio):
    streaming = streaming_overhead(85.6 / gbps, 3.1)
    wins = [ratio for ratio in range(1, 10**5) if disaggregation_wins(7, ratio, 100, streaming)]
    if least_ratio is None:
        assert not wins and streaming > 2 - 1 / 7
    else:
        assert wins[0] / 100 == pytest.approx(least_ratio, abs=0.011)


@given(st.integers(2, 16), st.floats(0.1, 10), st.floats(0.01, 1), st.integers(1, 300),
       st.floats(1.0, 2.5))  # fmt: skip
def test_equation_5_compares_the_two_throughputs(machines, prompt_s, token_s, tokens, streaming):
    batch = Microbatch(8, 1, 1, 1, prompt_s * machines, token_s * machines, tokens)
    prompt, token = balanced_split(machines, prompt_s, token_s, tokens, streaming)
    split = streaming * machines * prompt_s / prompt
    assert split == pytest.approx(machines * tokens * token_s / token)
    together = colocated_s(machines, batch)
    if abs(split - together) > 1e-6 * together:
        assert disaggregation_wins(machines, prompt_s, token_s, streaming) == (split < together)


@given(st.integers(0, 10**6))
def test_the_planned_split_is_the_best_that_fits(seed):
    source = random.Random(seed)
    machines, layers = source.randint(2, 12), source.randint(4, 12)
    sizes = [source.randint(1, 5) for _ in range(3)]
    batch = Microbatch(layers, *sizes, source.uniform(1, 20), source.uniform(0.01, 1), 50)
    memory, bandwidth = source.randint(20, 200), source.uniform(1, 100)
    prompt_least, token_least = least_machines(batch, memory)
    options = [
        max(
            max(batch.prompt_s / n, layers * sizes[1] / n / bandwidth),
            50 * batch.token_s / (machines - n),
        )
        for n in range(1, machines)
        if prompt_least and token_least and n >= prompt_least and machines - n >= token_least
    ]
    if not options:
        with pytest.raises(BadRequest, match="machine"):
            plan_split(machines, batch, memory, bandwidth)
        return
    splits = plan_split(machines, batch, memory, bandwidth)
    assert splits[0].seconds == pytest.approx(min(options)) and len(splits) == len(options)
    assert all(split.prompt + split.token == machines for split in splits)


def test_memory_that_no_number_of_machines_has():
    batch = Microbatch(10, 2 * GB, GB, GB, 1.0, 0.1, 10)
    with pytest.raises(BadRequest, match="a layer and a microbatch's KV in it take 3 GB"):
        plan_split(100, batch, 2.5 * GB, GB)
    with pytest.raises(BadRequest, match="the KV of a microbatch takes 20 GB"):
        plan_split(100, batch, 20.5 * GB, GB)


@pytest.mark.parametrize(("bandwidth", "helps"), [(1e12, True), (100e9, False)])
def test_swapping(bandwidth, helps):
    """2 x 100 x 50 ms, against bringing 1050 x 10 MB back some 100 times, in 10.6 s at 100 GB/s."""
    assert swapping_helps(0.05, 100, 1000, 10e6, bandwidth) == helps


@pytest.mark.parametrize(("depth", "tokens"), [*itertools.product([1, 2, 3, 7], [1, 4, 60])])
def test_a_full_pipeline_of_fresh_microbatches(depth, tokens):
    """`(2D-1)·Y + N·D·t`, with Y and t of a stage."""
    prompt, token = 3.0, 0.25
    served = colocated([Job(0.0, tokens)] * depth, depth, prompt * depth, token * depth)
    expected = (2 * depth - 1) * prompt + tokens * depth * token
    assert served.makespan_s == pytest.approx(expected)
    assert served.cost(hourly=3600.0) == pytest.approx(depth * expected)


def test_many_equal_microbatches_are_as_fast_as_the_slower_pipeline():
    served = disaggregated([Job(0.0, 20)] * 400, 3, 5, 6.0, 0.5, streaming=1.5)
    assert served.makespan_s / 400 == pytest.approx(max(1.5 * 6 / 3, 20 * 0.5 / 5), rel=0.02)
    assert served.machines == 8


def test_a_prompt_delays_the_tokens_behind_it():
    """Two stages. The third microbatch takes the place of the first at 2 + 1 token."""
    jobs = [Job(0.0, 1), Job(0.0, 3), Job(0.0, 1)]
    # Stage times 1 and 0.5. Prompts end at 2 and 3, the first token at 3.5.
    served = colocated(jobs, 2, 2.0, 1.0)
    # Third prompt: 3.5 to 5.5. The second's tokens: 3 to 4 (stage 2 at 3.5), then behind it.
    assert served.ends_s == pytest.approx((3.5, 7.0, 6.5))


def test_data_parallel_pipelines_get_the_jobs_in_turn():
    jobs = [Job(float(n), n + 1) for n in range(6)]
    both = data_parallel(jobs, 2, 3, 3.0, 0.3)
    assert both.ends_s[::2] == colocated(jobs[::2], 3, 3.0, 0.3).ends_s
    assert both.ends_s[1::2] == colocated(jobs[1::2], 3, 3.0, 0.3).ends_s
    assert both.machines == 6


def test_no_machine_is_no_pipeline():
    with pytest.raises(BadRequest, match="1 machine or more, not 0"):
        colocated([Job(0.0, 1)], 0, 1.0, 1.0)

"""The phases' queues against queueing theory, and against the virtual engines."""

from __future__ import annotations

import itertools
import random
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.latency import FittedLatency, StepWork
from engine.protocol import BadRequest
from router.planning import (
    Arrival,
    Division,
    Evaluator,
    Instance,
    Overhead,
    Sample,
    decode_ends,
    highest_rate,
    prefill_ends,
)
from router.planning.goodput import reaches
from router.telemetry import Slo
from router.workload import poisson


def instance(prefill=(0.0, 0.0, 0.0), decode=(0.0, 0.0, 0.0), *, tp=1, pp=1, pool=10**9):
    step = FittedLatency(prefill, decode, decode, 10**6, pp, 0.0)
    return Instance(Division(tp, pp), step, pool)


def poisson_arrivals(rate: float, count: int, prompt: int = 1, output: int = 1) -> list[Arrival]:
    times = itertools.islice(poisson(5, rate), count)
    return [Arrival(at_s, prompt, output) for at_s in times]


def waits(ends: list[float], arrivals: list[Arrival]) -> list[float]:
    return [end - each.at_s for end, each in zip(ends, arrivals, strict=True)]


def close(times: list[float], expected: float) -> None:
    """The mean is within three standard errors, of batches of a thousand."""
    means = [fmean(times[begin : begin + 1000]) for begin in range(0, len(times), 1000)]
    error = stdev(means) / len(means) ** 0.5
    assert abs(fmean(means) - expected) < 3 * error < 0.2


@pytest.mark.parametrize(("rate", "expected"), [(0.5, 1.5), (0.8, 3.0)])
def test_prefills_one_by_one_are_the_queue_m_d_1(rate, expected):
    """DistServe's equation 1 with D = 1."""
    arrivals = poisson_arrivals(rate, 50_000)
    close(waits(prefill_ends(arrivals, instance((1000, 0, 0)), max_tokens=1), arrivals), expected)


@pytest.mark.parametrize(("rate", "expected"), [(1.0, 1.25), (1.5, 1.75)])
def test_two_stages_are_equation_2(rate, expected):
    arrivals = poisson_arrivals(rate, 50_000)
    ends = prefill_ends(arrivals, instance((1000, 0, 0), pp=2), max_tokens=1)
    close(waits(ends, arrivals), expected)


@pytest.mark.parametrize(("rate", "expected"), [(0.5, 0.8333), (1.0, 1.3333)])
def test_a_faster_step_is_equation_3(rate, expected):
    arrivals = poisson_arrivals(rate, 50_000)
    faster = instance((1000 / 1.5, 0, 0), tp=2)
    close(waits(prefill_ends(arrivals, faster, max_tokens=1), arrivals), expected)


def test_a_prefill_batch_has_so_many_tokens_and_always_a_first_one():
    arrivals = [Arrival(0, n, 1) for n in (10, 60, 50, 500, 20)]
    ends = prefill_ends(arrivals, instance((0, 1000, 0)), max_tokens=100)
    assert ends == [70, 70, 120, 620, 640]
    each = prefill_ends([Arrival(0, 30, 1)] * 2, instance((1, 0, 1)), max_tokens=100)
    assert each == [pytest.approx(1e-3 + 2 * 0.9)] * 2  # squares are of each prompt by itself


def test_overhead_is_in_the_first_stage():
    one = [Arrival(0.0, 10, 2)]
    late = Overhead(100.0, 10.0)
    assert prefill_ends(one, instance((1000, 0, 0), pp=2), max_tokens=1, overhead=late) == [1.2]
    steps = instance(decode=(1000, 0, 0), pp=2)
    assert decode_ends(one, steps, max_batch=9, overhead=late) == [1.2]


def test_decodes_join_at_the_next_step_and_leave_after_their_last():
    """Steps of B seconds, with B sequences."""
    steps = instance(decode=(0, 0, 1000))
    arrivals = [Arrival(0, 5, 4), Arrival(0.5, 5, 2), Arrival(0.6, 5, 1)]
    # One alone to 1, two to 3, the first one alone to 4; the third one has all its tokens.
    assert decode_ends(arrivals, steps, max_batch=9) == [4, 3, 0.6]


def test_a_step_counts_the_tokens_before_it():
    steps = instance(decode=(0, 1000, 0))
    assert decode_ends([Arrival(0, 10, 3)], steps, max_batch=9) == [10 + 11]


def test_a_full_pool_and_a_full_batch_let_nobody_in():
    steps, arrivals = instance(decode=(1000, 0, 0), pool=15), [Arrival(0, 5, 3)] * 3
    assert decode_ends(arrivals, steps, max_batch=9) == [2, 4, 6]
    assert decode_ends(arrivals, instance(decode=(1000, 0, 0)), max_batch=2) == [2, 2, 4]
    with pytest.raises(BadRequest, match="20 tokens exceeds the pool of 15"):
        decode_ends([Arrival(0, 10, 10)], steps, max_batch=9)


def test_an_empty_batch_of_a_pipeline_starts_at_once():
    """Two stages of half a second. A request that comes while the other is under way waits for
    the first stage only."""
    steps = instance(decode=(1000, 0, 0), pp=2)
    arrivals = [Arrival(0, 5, 2), Arrival(0.6, 5, 2)]
    assert decode_ends(arrivals, steps, max_batch=9) == [1, 1.6]


@given(st.integers(0, 10**6), st.integers(1, 3))
def test_decodes_take_no_less_than_alone_and_the_pool_is_never_exceeded(seed, pp):
    source = random.Random(seed)
    arrivals = sorted(
        Arrival(source.random() * 5, source.randint(1, 20), source.randint(1, 20))
        for _ in range(20)
    )
    steps = instance(decode=(100, 1, 10), pp=pp, pool=60)
    ends = decode_ends(arrivals, steps, max_batch=4)
    for end, each in zip(ends, arrivals, strict=True):
        work = [StepWork(decodes=1, context=each.prompt + n) for n in range(each.output - 1)]
        assert end - each.at_s >= pp * sum(map(steps.step.seconds, work)) - 1e-9


def evaluator(arrivals: list[Arrival], **fields) -> Evaluator:
    given = {
        "slo": Slo(1500.0, 100.0), "target": 0.9, "separate": False, "max_tokens": 1,
        "max_batch": 1, **fields,
    }  # fmt: skip
    return Evaluator(Sample(tuple(arrivals)), **given)


def test_the_goodput_of_a_queue():
    """P90 of the waiting time of M/D/1 with D = 1: below 0.5 s up to a load of some 0.25."""
    arrivals = poisson_arrivals(1.0, 20_000)
    found = evaluator(arrivals).prefill(instance((1000, 0, 0)))
    times = sorted(waits(prefill_ends([Arrival(a.at_s / found, 1, 1) for a in arrivals],
                                      instance((1000, 0, 0)), max_tokens=1),
                         [Arrival(a.at_s / found, 1, 1) for a in arrivals]))  # fmt: skip
    assert times[int(0.9 * len(times)) - 1] <= 1.5
    # A Lindley recursion written here finds the same rate by steps of 0.005.
    free, best = 0.0, 0.0
    for step in range(1, 200):
        rate, free, met = step * 0.005, 0.0, 0
        for each in arrivals:
            free = max(free, each.at_s / rate) + 1.0
            met += free - each.at_s / rate <= 1.5
        if met >= 0.9 * len(arrivals):
            best = rate
    assert found == pytest.approx(best, abs=0.02) and 0.1 < found < 0.5


def test_lax_objectives_end_where_the_instance_is_saturated():
    arrivals = poisson_arrivals(1.0, 200, 10, 11)
    lax = evaluator(arrivals, slo=Slo(1e9, 1e9), max_batch=4)
    assert lax.prefill(instance((500, 0, 0))) == pytest.approx(2.0)
    # Four sequences a step of a quarter of a second, ten steps each.
    assert lax.decode(instance(decode=(250, 0, 0))) == pytest.approx(4 / 0.25 / 10)
    assert lax.joint(instance((500, 0, 0)), instance(decode=(250, 0, 0))) == pytest.approx(1.6)


def test_objectives_that_no_load_meets_give_no_goodput():
    arrivals = poisson_arrivals(1.0, 50, 10, 11)
    assert evaluator(arrivals).prefill(instance((1600, 0, 0))) == 0.0
    assert evaluator(arrivals).decode(instance(decode=(101, 0, 0))) == 0.0


def test_joint_objectives_are_stricter_than_separate_ones():
    """Half of the requests have a long prompt and one token, the others two slow tokens."""
    arrivals = [Arrival(float(n), 1 if n % 2 else 3, 2 if n % 2 else 1) for n in range(100)]
    fields = {"slo": Slo(2000.0, 3000.0), "target": 0.5, "max_batch": 100}
    prefill, decode = instance((0, 1000, 0)), instance(decode=(4000, 0, 0))
    together = evaluator(arrivals, **fields).attained([prefill], [decode], 1e-3)
    assert (together.ttft, together.tpot, together.both) == (0.5, 0.5, 0.0)
    assert together.share(separate=True) == 0.5 and together.share(separate=False) == 0.0


def test_a_fleet_gets_the_requests_in_turn_and_moving_kv_takes_time():
    arrivals = [Arrival(0.0, 1, 2)] * 4
    one, two = [instance((1000, 0, 0))], [instance((1000, 0, 0))] * 2
    decode = [instance(decode=(50, 0, 0))]
    assert evaluator(arrivals, max_batch=9).attained(one, decode, 1.0).ttft == 0.25
    assert evaluator(arrivals, max_batch=9).attained(two, decode, 1.0).ttft == 0.5
    moving = evaluator(arrivals, kv_s=lambda tokens: 0.06 * tokens, max_batch=9)
    assert moving.attained(one, decode, 1.0).tpot == 0.0


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 100))
def test_a_share_is_decided_as_by_counting_all_and_no_later_than_it_can_be(met, percent):
    share, taken = percent / 100, 0

    def one_by_one():
        nonlocal taken
        for each in met:
            taken += 1
            yield each

    reached = reaches(one_by_one(), len(met), share)
    assert reached == (sum(met) / len(met) >= share)
    before = met[: taken - 1]  # undecided: the rest may still be met, or not
    left = len(met) - len(before)
    assert sum(before) / len(met) < share <= (sum(before) + left) / len(met)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_trials_that_stop_early_find_the_goodput_of_whole_ones(separate, seed):
    """Against a bisection over `attained`, which runs all requests to their end."""
    source, at_s, arrivals = random.Random(seed), 0.0, []
    for _ in range(120):
        at_s += source.expovariate(1)
        arrivals.append(Arrival(at_s, source.randint(1, 60), source.randint(1, 40)))
    one = evaluator(arrivals, slo=Slo(source.uniform(100, 900), source.uniform(20, 40)),
                    separate=separate, max_tokens=64, max_batch=8,
                    kv_s=lambda tokens: tokens * 1e-4)  # fmt: skip
    prefill = instance((5, 1, 0.001), pp=source.randint(1, 3))
    decode = instance(decode=(8, 0.01, 0.5), pp=source.randint(1, 2), pool=500)
    found = one.joint(prefill, decode)
    most = min(one._prefill_saturation(prefill), one._decode_saturation(decode))

    def passes(rate: float) -> bool:
        return one.attained([prefill], [decode], rate).share(separate) >= one.target

    assert found == highest_rate(passes, most, one.precision * most) > 0


def test_bisection():
    assert highest_rate(lambda rate: rate <= 3.3, 10.0, 0.01) == pytest.approx(3.3, abs=0.01)
    assert highest_rate(lambda rate: True, 10.0, 0.01) == 10.0
    assert highest_rate(lambda rate: False, 10.0, 0.01) == 0.0


def test_runs_are_long_enough_to_fill_a_decode_instance():
    """Ten requests never make a batch of forty, whose steps take the objective's 100 ms."""
    arrivals = poisson_arrivals(1.0, 10, 1, 101)
    steps = instance(decode=(20.0, 0, 2.0))
    saturated = 80 / 0.18 / 100
    once = evaluator(arrivals, max_batch=80, fills=0).decode(steps)
    assert once == pytest.approx(saturated)
    assert evaluator(arrivals, max_batch=80).decode(steps) < 0.95 * saturated

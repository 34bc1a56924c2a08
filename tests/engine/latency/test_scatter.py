"""The scatter of steps around a model."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from engine.latency import Factors, FixedLatency, Measured, StepWork, scatter_of

SCATTER = (0.9, 0.95, 1.0, 1.05, 1.6)


def test_the_scatter_of_steps_is_their_quantiles():
    model, source = FixedLatency(10.0), random.Random(1)
    measured = [Measured(StepWork(8), 0.01 * source.uniform(0.9, 1.3)) for _ in range(5000)]
    scatter = scatter_of(model, measured)
    assert len(scatter) == 256 and sorted(scatter) == list(scatter)
    assert (scatter[0], scatter[128], scatter[-1]) == pytest.approx((0.9, 1.1, 1.3), abs=0.01)
    assert fmean(scatter) == pytest.approx(1.1, abs=0.01)


def test_few_steps_have_as_many_factors_and_no_steps_none():
    model = FixedLatency(10.0)
    measured = [Measured(StepWork(8), seconds) for seconds in (0.02, 0.01)]
    assert scatter_of(model, measured) == (1.25, 1.75)
    assert scatter_of(model, []) == scatter_of(model, [Measured(StepWork(), 0.01)]) == ()


def test_the_factors_of_an_engine_are_drawn_from_the_scatter_and_its_seed_decides():
    random.seed(5)
    factors, others = Factors(SCATTER, 64), Factors(SCATTER, 64)
    random.seed(5)
    again = Factors(SCATTER, 64)
    drawn = []
    for _ in range(5000 // 50):
        drawn += factors.next(50)
        assert again.next(50) == factors.next(50) != others.next(50)
        for each in (factors, again, others):
            each.pass_over(50)
    assert set(drawn) == set(SCATTER)
    assert fmean(drawn) == pytest.approx(fmean(SCATTER), abs=0.02)


def test_the_time_of_steps_in_a_row_is_the_sum_of_their_own():
    factors = Factors(SCATTER, 64)
    for _ in range(300):  # beyond the factors' repetition
        drawn = factors.next(64)
        for steps in (0, 1, 7, 64):
            own = [(0.02 + 1e-4 * i) * drawn[i] for i in range(steps)]
            assert factors.seconds(0.02, 1e-4, steps) == pytest.approx(sum(own))
        factors.pass_over(37)

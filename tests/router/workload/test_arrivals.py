"""Arrival times: their rates, and how far they vary."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from router.workload.arrivals import evenly, gamma, poisson, replayed

GAPS = 4000
SIGMAS = 5


def some(times, count=GAPS + 1):
    return list(itertools.islice(times, count))


def gaps(times):
    return [later - earlier for earlier, later in itertools.pairwise(some(times))]


def test_evenly():
    assert some(evenly(4), 3) == [0, 0.25, 0.5]


def test_poisson_has_its_rate_and_exponential_gaps():
    found = gaps(poisson(0, 4))
    assert abs(statistics.fmean(found) - 0.25) < SIGMAS * 0.25 / math.sqrt(GAPS)
    # The deviation equals the mean; the kurtosis is 9.
    assert abs(statistics.variance(found) - 0.25**2) < SIGMAS * 0.25**2 * math.sqrt(8 / GAPS)


@pytest.mark.parametrize("cv", [0.25, 1.0, 3.0])
def test_gamma_has_its_rate_and_variation(cv):
    found = gaps(gamma(1, 4, cv))
    assert min(found) >= 0
    assert abs(statistics.fmean(found) - 0.25) < SIGMAS * cv * 0.25 / math.sqrt(GAPS)
    variance, kurtosis = (cv * 0.25) ** 2, 3 + 6 * cv**2
    error = variance * math.sqrt((kurtosis - 1) / GAPS)
    assert abs(statistics.variance(found) - variance) < SIGMAS * error


def test_gamma_of_variation_1_is_poisson():
    assert some(gamma(7, 4, 1.0), 50) == pytest.approx(some(poisson(7, 4), 50))


def test_the_same_seed_gives_the_same_times():
    for make in (lambda seed: poisson(seed, 5), lambda seed: gamma(seed, 5, 2.0)):
        assert some(make(1), 20) == some(make(1), 20) != some(make(2), 20)


def test_replayed_begins_at_0_and_is_faster_by_the_factor():
    assert list(replayed([100.0, 103.0, 103.0, 109.0], 3.0)) == [0, 1, 1, 3]
    assert list(replayed([])) == []

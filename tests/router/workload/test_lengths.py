"""Lengths: the moments of their distributions, and their bounds."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from router.workload.lengths import drawn, fixed, lognormal, normal, uniform

DRAWS = 4000
SIGMAS = 5  # a right mean is further off in one of two million tests


def some(lengths, count=DRAWS):
    return list(itertools.islice(lengths, count))


def check_mean(values, mean: float, deviation: float) -> None:
    """Check a sample mean; its standard error is the deviation over the root of the draws."""
    error = deviation / math.sqrt(len(values))
    assert abs(statistics.fmean(values) - mean) < SIGMAS * error


def check_deviation(values, deviation: float, kurtosis: float) -> None:
    """Check a sample deviation; the error of the variance follows from the fourth moment."""
    error = deviation**2 * math.sqrt((kurtosis - 1) / len(values))
    assert abs(statistics.variance(values) - deviation**2) < SIGMAS * error


def phi(x: float) -> float:
    """The cumulative distribution of the standard normal."""
    return (1 + math.erf(x / math.sqrt(2))) / 2


def clipped_moments(median: float, sigma: float, low: float, high: float) -> tuple[float, float]:
    """Return mean and deviation of a log-normal distribution that is clipped, in closed form."""
    a, b = ((math.log(edge / median)) / sigma for edge in (low, high))

    def moment(power: int) -> float:
        inside = median**power * math.exp((power * sigma) ** 2 / 2)
        inside *= phi(b - power * sigma) - phi(a - power * sigma)
        return low**power * phi(a) + inside + high**power * (1 - phi(b))

    return moment(1), math.sqrt(moment(2) - moment(1) ** 2)


def test_fixed():
    assert some(fixed(7), 3) == [7, 7, 7]


def test_uniform_has_its_moments_and_both_ends():
    values = some(uniform(0, 50, 100))
    assert (min(values), max(values)) == (50, 100)
    deviation = math.sqrt((51**2 - 1) / 12)
    check_mean(values, 75, deviation)
    check_deviation(values, deviation, kurtosis=1.8)


def test_normal_has_its_moments():
    values = some(normal(0, 3000, 5))
    deviation = math.sqrt(5**2 + 1 / 12)  # rounding adds a uniform error
    check_mean(values, 3000, deviation)
    check_deviation(values, deviation, kurtosis=3)


def test_lognormal_has_its_moments_and_is_clipped():
    median, sigma, low, high = 100, 0.8, 20, 600
    values = some(lognormal(0, median, sigma, low, high))
    assert (min(values), max(values)) == (low, high)
    mean, deviation = clipped_moments(median, sigma, low, high)
    check_mean(values, mean, deviation)
    logs = [math.log(value) for value in some(lognormal(1, 10**6, 0.5, 1, 10**12))]
    check_mean(logs, math.log(10**6), 0.5)
    check_deviation(logs, 0.5, kurtosis=3)


def test_clipped_moments_are_those_of_a_wide_sample():
    """The closed form against itself without clipping, where it is well known."""
    mean, deviation = clipped_moments(100, 0.5, 1e-9, 1e12)
    assert mean == pytest.approx(100 * math.exp(0.125))
    assert deviation == pytest.approx(mean * math.sqrt(math.expm1(0.25)))


def test_drawn_follows_the_list_and_equal_seeds_give_pairs():
    pairs = [(10, 1), (20, 2), (20, 3), (30, 4)]
    inputs, outputs = zip(*pairs, strict=True)
    both = list(zip(some(drawn(3, inputs)), some(drawn(3, outputs)), strict=True))
    assert set(both) == set(pairs)
    check_mean([a for a, _ in both], 20, math.sqrt(50))


def test_no_length_is_below_one():
    for lengths in (
        fixed(0), uniform(0, 0, 1), normal(0, 0, 5), lognormal(0, 1, 3, 0, 9), drawn(0, [0, -3]),
    ):  # fmt: skip
        assert min(some(lengths, 200)) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: uniform(seed, 1, 1000),
        lambda seed: normal(seed, 3000, 50),
        lambda seed: lognormal(seed, 100, 1.0, 4, 1024),
        lambda seed: drawn(seed, range(1, 1000)),
    ],
    ids=["uniform", "normal", "lognormal", "drawn"],
)
def test_the_same_seed_gives_the_same_lengths(make):
    assert some(make(1), 20) == some(make(1), 20) != some(make(2), 20)

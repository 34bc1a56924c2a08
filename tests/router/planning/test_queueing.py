"""DistServe's equations 1 to 3. `test_phases.py` holds the simulated queues to the same numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import BadRequest
from router.planning import crossover, divided_ttft, mean_ttft, pipelined_ttft


@pytest.mark.parametrize(("load", "expected"), [(0.5, 1.5), (0.8, 3.0)])
def test_distserve_equation_1(load, expected):
    assert mean_ttft(load, 1.0) == pytest.approx(expected)


@pytest.mark.parametrize(("load", "expected"), [(1.0, 1.25), (1.5, 1.75)])
def test_distserve_equation_2(load, expected):
    assert pipelined_ttft(load, 1.0) == pytest.approx(expected)


@pytest.mark.parametrize(("load", "expected"), [(0.5, 0.8333), (1.0, 1.3333)])
def test_distserve_equation_3(load, expected):
    assert divided_ttft(load, 1.0, 1.5) == pytest.approx(expected, abs=5e-5)


@given(st.floats(0.01, 100), st.floats(0.01, 0.99), st.floats(1.01, 1.99))
def test_the_equations_as_printed(rate, load, speedup):
    """With D of any length: the waits of equations 2 and 3 have their own largest loads."""
    d = load / rate
    assert mean_ttft(rate, d) == pytest.approx(d + rate * d**2 / (2 * (1 - rate * d)))
    d = 2 * load / rate
    assert pipelined_ttft(rate, d) == pytest.approx(d + rate * d**2 / (4 * (2 - rate * d)))
    d = speedup * load / rate
    assert divided_ttft(rate, d, speedup) == pytest.approx(
        d / speedup + rate * d**2 / (2 * speedup * (speedup - rate * d))
    )


@pytest.mark.parametrize(
    ("speedup", "load"), [(1.2, 0.4338), (1.5, 0.9361), (1.7, 1.2571), (1.9, 1.6257)]
)
def test_where_pipelines_become_faster_than_divided_layers(speedup, load):
    """DistServe, figure 4: layers divided in two are faster at lower loads."""
    assert crossover(speedup) == pytest.approx(load, abs=5e-5)
    assert divided_ttft(0.99 * load, 1.0, speedup) < pipelined_ttft(0.99 * load, 1.0)
    assert divided_ttft(1.01 * load, 1.0, speedup) > pipelined_ttft(1.01 * load, 1.0)


def test_queues_that_only_grow_and_impossible_speedups():
    for grows in (
        lambda: mean_ttft(1.0, 1.0),
        lambda: pipelined_ttft(2.0, 1.0),
        lambda: divided_ttft(1.5, 1.0, 1.5),
    ):
        with pytest.raises(BadRequest, match="the queue only grows"):
            grows()
    for speedup in (1.0, 2.0):
        with pytest.raises(BadRequest, match="between 1 and 2"):
            crossover(speedup)

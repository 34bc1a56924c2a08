"""A device that own steps and debtors share."""

from __future__ import annotations

import pytest

from engine.latency import FixedLatency
from engine.virtual.compute import Compute
from kvcache.types import EngineId

A, B = EngineId("a"), EngineId("b")


def compute() -> Compute:
    return Compute(FixedLatency(1.0), 0.0)


def test_idle_time_pays_for_debtors():
    device = compute()
    device.serve(A, 0.5, 0.0)
    device.leave(A, 4.0)
    assert (device.lent_s, device.owed_s) == (2.0, 0.0)


def test_own_steps_pay_for_what_was_computed_beside_them():
    device = compute()
    device.run(0.0)
    device.serve(A, 0.25, 0.0)
    device.leave(A, 4.0)
    assert device.owed_s == pytest.approx(1.0)
    assert device.take(4, 1.0) == pytest.approx(0.25)
    assert device.owed_s == pytest.approx(0.0)


def test_a_step_is_at_most_twice_as_long_for_one_debtor():
    device = compute()
    device.run(0.0)
    device.serve(A, 1.0, 0.0)
    device.leave(A, 10.0)
    assert device.take(2, 1.0) == pytest.approx(1.0)
    assert device.owed_s == pytest.approx(8.0)
    device.put_back(1.0)  # one of the two was not computed
    device.rest(10.0)
    device.run(15.0)
    assert device.owed_s == pytest.approx(4.0)


def test_the_device_is_divided_evenly():
    device = compute()
    assert device.parts(A) == 1
    device.serve(A, 0.1, 0.0)
    assert (device.parts(A), device.parts(B)) == (1, 2)
    device.run(0.0)
    assert (device.parts(A), device.parts(B)) == (2, 3)

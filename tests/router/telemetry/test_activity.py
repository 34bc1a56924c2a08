"""What is kept of the requests that run and of those that ended lately, and that it is bounded."""

from __future__ import annotations

import tracemalloc
from typing import Any

from router.base import EngineId, EngineRequestId, RevisionNumber
from router.telemetry import WINDOW_S, Activity, Leg, Receipt
from router.telemetry.activity import MOST_PAIRS, MOST_SAMPLES, SLOW_KEPT, SLOW_S, Flows


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def receipt(id: str, clock: Clock, **fields: Any) -> Receipt:
    return Receipt(
        id, RevisionNumber(1), "s", {}, 1, 10, began=clock(), clock=clock, **fields
    )  # fmt: skip


def serve(activity: Activity, clock: Clock, id: str, seconds: float, status: str = "done") -> None:
    one = receipt(id, clock)
    activity.begin(one)
    clock.now += seconds
    one.status, one.ms, one.first_token_ms = status, 1e3 * seconds, 500 * seconds  # type: ignore[assignment]
    one.completion_tokens = 7
    activity.end(one)


def test_running_requests_sums_and_samples():
    clock = Clock()
    activity = Activity(100, clock)
    first = receipt("first", clock)
    activity.begin(first)
    serve(activity, clock, "a", 1.0)
    serve(activity, clock, "b", 1.0, "failed")
    serve(activity, clock, "c", 1.0, "cancelled")
    assert [one.id for one in activity.running] == ["first"]
    assert (activity.begun, activity.ended, activity.failed, activity.tokens) == (4, 3, 1, 21)
    assert [(one.done, one.ttft_ms, one.jct_ms) for one in activity.samples()] == [
        (True, 500.0, 1000.0), (False, 500.0, None),
    ]  # fmt: skip
    clock.now += WINDOW_S - 1.5
    assert len(activity.samples()) == 1
    clock.now += 1
    assert activity.samples() == []


def test_two_requests_of_one_id_both_run():
    clock = Clock()
    activity = Activity(100, clock)
    twins = [receipt("same", clock), receipt("same", clock)]
    for one in twins:
        activity.begin(one)
    activity.end(twins[0])
    assert [one is twins[1] for one in activity.running] == [True]


def test_the_slowest_of_the_last_minutes_are_kept_and_older_ones_not():
    clock = Clock()
    activity = Activity(1000, clock)
    serve(activity, clock, "slowest", 60.0)
    for number in range(3000):
        serve(activity, clock, f"r{number}", 0.004 + (number % 997) * 1e-6)
    kept = {one.id: one for one in activity.slow}
    assert "slowest" in kept
    assert len(kept) <= 20 * SLOW_KEPT + SLOW_KEPT
    assert sum(id.startswith("r") for id in kept) >= SLOW_KEPT
    clock.now += SLOW_S
    assert "slowest" not in {one.id for one in activity.slow}
    clock.now += SLOW_S
    assert list(activity.slow) == []


def test_nothing_grows_with_the_number_of_requests():
    clock = Clock()
    activity = Activity(100, clock)
    for number in range(MOST_SAMPLES + 10):
        serve(activity, clock, f"r{number}", 0.0005)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(2000):
        serve(activity, clock, f"r{number}", 0.0005)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(activity.samples()) == MOST_SAMPLES
    assert grown < 1 << 19


def test_flows_forget_the_pairs_unused_for_longest():
    flows = Flows()
    flows.add("a", "b", 10)
    for number in range(MOST_PAIRS - 1):
        flows.add("x", str(number), 1)
    flows.add("a", "b", 5)
    flows.add("y", "z", 1)
    sums = {(source, target): (calls, size) for source, target, calls, size in flows}
    assert len(sums) == MOST_PAIRS
    assert sums["a", "b"] == (2, 15) and ("x", "0") not in sums


def test_an_outline_names_the_engines_of_the_legs_and_counts_their_tokens():
    clock = Clock()
    one = receipt("r", clock)
    for engine, tokens in (("a", 0), ("b", 3), ("a", 4)):
        leg = Leg("start_generate", EngineId(engine), EngineRequestId("x"), 0, 1, 0, 10, 0.0)
        leg.tokens = tokens
        one.legs.append(leg)
    clock.now += 0.25
    told = one.outline()
    assert (told["engines"], told["completion_tokens"], told["ms"]) == (["a", "b"], 7, 250.0)
    assert told["phase"] == "prefill (start_generate on a)"
    with one.queueing("for room on a"):
        clock.now += 0.5
        assert one.outline()["phase"] == "queue"
        assert one.waiting[0].ms is None
    assert (one.waiting[0].why, one.waiting[0].ms, one.queued_ms) == ("for room on a", 500.0, 500.0)

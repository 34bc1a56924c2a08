"""Files of time lines: whatever is put in, the rules of the format hold and nothing is lost."""

from __future__ import annotations

from chrome_trace_rules import read_trace
from hypothesis import given
from hypothesis import strategies as st

from router.timeline import ChromeTrace

TIMES = st.floats(0, 100, allow_nan=False)
LENGTHS = st.one_of(st.just(0.0), st.floats(0, 20, allow_nan=False))
SLICES = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]), TIMES, LENGTHS, st.lists(st.tuples(TIMES, LENGTHS), max_size=3)
    ),
    max_size=30,
)


def written(trace: ChromeTrace, events: int = 512):
    return read_trace(b"".join(trace.pieces({"about": "this"}, events)))


@given(SLICES, st.integers(1, 7))
def test_any_slices_and_flows_make_a_valid_file(slices, events):
    trace = ChromeTrace()
    numbers = {name: trace.process(name, ["work"]) for name in ("a", "b")}
    made = [
        trace.slice(
            numbers[name], "work", f"slice {number}", 1e6 + begin, seconds, {"n": number},
            [("part", 1e6 + begin + at, length) for at, length in inner],
        )
        for number, (name, begin, seconds, inner) in enumerate(slices)
    ]  # fmt: skip
    if len(made) > 1:
        trace.flow(made)
    file = written(trace, events)
    assert file.about == {"about": "this"}
    outer = {one["args"]["n"]: one for one in file.slices if one["args"]}
    assert len(outer) == len(slices)
    for number, (name, begin, seconds, _) in enumerate(slices):
        one = outer[number]
        assert file.processes[one["pid"]] == name
        assert abs(one["ts"] / 1e6 + trace.origin_s - (1e6 + begin)) < 3e-6
        assert abs(one["dur"] / 1e6 - seconds) < 3e-6
    if slices:
        assert min(one["ts"] for one in file.slices) == 0


def test_slices_of_one_track_that_overlap_get_lanes_of_their_own():
    trace = ChromeTrace()
    number = trace.process("engine", ["calls", "steps"])
    for name, begin in (("first", 0.0), ("second", 0.5), ("third", 1.0), ("fourth", 1.2)):
        trace.slice(number, "calls", name, begin, 1.0, {})
    file = written(trace)
    lanes = {one["name"]: file.threads[one["pid"], one["tid"]] for one in file.slices}
    assert lanes == {
        "first": "calls 1", "second": "calls 2", "third": "calls 1", "fourth": "calls 3",
    }  # fmt: skip
    assert "steps" in file.threads.values()


def test_slices_that_only_rounding_makes_overlap_share_a_lane():
    trace = ChromeTrace()
    number = trace.process("engine", ["steps"])
    at = 0.1
    for _ in range(1000):
        trace.slice(number, "steps", "step", at, 0.1 + 3e-9, {})
        at += 0.1
    assert [*written(trace).threads.values()] == ["steps"]


def test_a_flow_leads_through_its_slices_in_the_order_of_time_and_never_back():
    trace = ChromeTrace()
    number = trace.process("p", ["a", "b"])
    request = trace.slice(number, "a", "request", 1.0, 5.0, {}, [("queue", 1.0, 2.0)])
    late = trace.slice(number, "b", "late", 4.0, 1.0, {})
    soon = trace.slice(number, "b", "soon", 2.0, 1.0, {})
    before = trace.slice(number, "b", "before", 0.5, 0.2, {})
    trace.flow([request, late, soon, before])
    trace.flow([trace.slice(number, "a", "alone", 8.0, 1.0, {})])
    file = written(trace)
    assert [one["name"] for one in file.joined(1)] == ["queue", "soon", "late"]
    assert list(file.flows) == [1]

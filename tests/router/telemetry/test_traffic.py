"""Recorded traffic: what is kept of a request, for how long, and as which trace."""

from __future__ import annotations

from pathlib import Path

import orjson

from engine.protocol import page_names
from router.telemetry import Traffic, recording
from router.telemetry.traffic import ENTRY_BYTES, MOST_PAGES, NAME_BYTES, PAGE
from router.workload import WorkloadConfig, open_workload


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def told(traffic: Traffic, seconds: float = 1e9) -> list[dict]:
    pieces = list(recording(traffic.latest(seconds), 1 << 16))
    return [orjson.loads(line) for line in b"".join(pieces).splitlines()]


def test_a_request_is_its_times_its_lengths_and_names_of_pages():
    traffic = Traffic(60.0, 1 << 20, Clock())
    prompt = list(range(10, 60))
    traffic.add(99.0, [prompt], [7], "Ann's session", "balanced")
    traffic.add(99.5, [prompt[:15]], [0], None, "balanced")
    first, second = told(traffic)
    assert (first["at_s"], second["at_s"]) == (0.0, 0.5)
    assert (first["input_tokens"], first["output_tokens"], first["strategy"]) == (50, 7, "balanced")
    assert first["pages"] == page_names(prompt, PAGE) and len(first["pages"]) == 3
    assert second["pages"] == [] and "session" not in second
    # Neither the session's name nor a digest of it that others could make.
    other = Traffic(60.0, 1 << 20, Clock())
    other.add(99.0, [prompt], [7], "Ann's session", "balanced")
    assert len({"Ann's session", first["session"], told(other)[0]["session"]}) == 3


def test_requests_of_a_session_have_the_same_name_of_it():
    traffic = Traffic(60.0, 1 << 20, Clock())
    for session in ("a", "b", "a", "\ud800"):
        traffic.add(99.0, [[1]], [1], session, "s")
    names = [line["session"] for line in told(traffic)]
    assert names[0] == names[2] and len(set(names)) == 3


def test_each_choice_of_each_prompt_is_a_request():
    traffic = Traffic(60.0, 1 << 20, Clock())
    traffic.add(99.0, [[1] * 16, [2] * 32], [3, 4, 5, 6], None, "s")
    lines = told(traffic)
    assert [line["input_tokens"] for line in lines] == [16, 16, 32, 32]
    assert [line["output_tokens"] for line in lines] == [3, 4, 5, 6]
    assert lines[0]["pages"] == lines[1]["pages"] != lines[2]["pages"][:1]


def test_pages_of_a_prompt_are_bounded():
    traffic = Traffic(60.0, 1 << 20, Clock())
    long = [1] * (MOST_PAGES * PAGE + 100)
    traffic.add(99.0, [long], [1], None, "s")
    (line,) = told(traffic)
    assert line["input_tokens"] == len(long) and len(line["pages"]) == MOST_PAGES


def test_what_is_older_or_more_than_the_limits_is_dropped():
    clock = Clock()
    each = ENTRY_BYTES + 2 * NAME_BYTES
    traffic = Traffic(60.0, 10 * each, clock)
    for number in range(25):
        traffic.add(clock.now, [[number] * 32], [number], None, "s")
    assert [line["output_tokens"] for line in told(traffic)] == list(range(15, 25))
    assert traffic.bytes == 10 * each
    clock.now += 61
    assert told(traffic) == []  # too old, although nothing came to drop it
    traffic.add(clock.now, [[1]], [99], None, "s")
    assert (len(traffic), traffic.bytes) == (1, ENTRY_BYTES)


def test_the_latest_seconds_are_those_of_arrivals_in_their_order():
    clock = Clock()
    traffic = Traffic(60.0, 1 << 20, clock)
    for at, output in ((80.0, 1), (99.0, 3), (95.0, 2)):  # in the order of their ends
        traffic.add(at, [[1]], [output], None, "s")
    assert [line["output_tokens"] for line in told(traffic)] == [1, 2, 3]
    assert [line["output_tokens"] for line in told(traffic, 10.0)] == [2, 3]


def test_nothing_is_kept_where_it_is_switched_off():
    traffic = Traffic(0.0, 1 << 20)
    traffic.add(99.0, [[1] * 32], [1], None, "s")
    assert (len(traffic), traffic.bytes) == (0, 0)


def test_a_recording_is_a_workload(tmp_path: Path):
    traffic = Traffic(60.0, 1 << 20, Clock())
    shared = list(range(10, 42))
    traffic.add(90.0, [[*shared, 1, 2]], [5], "x", "s")
    traffic.add(93.5, [[*shared, 3]], [0], "x", "s")
    file = tmp_path / "traffic.jsonl"
    file.write_bytes(b"".join(recording(traffic.latest(60.0), 10)))
    requests = list(open_workload(WorkloadConfig(name=str(file))).requests)
    assert [request.at_s for request in requests] == [0.0, 3.5]
    assert [request.body["max_tokens"] for request in requests] == [5, 1]
    one, two = (request.body["prompt"] for request in requests)
    assert (len(one), len(two)) == (34, 33) and one[:32] == two[:32] and one[32] != two[32]
    assert requests[0].session == requests[1].session is not None

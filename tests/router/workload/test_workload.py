"""Workloads by name and from files."""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
from pathlib import Path

import pytest

from engine.protocol import BadRequest
from router.workload import (
    WORKLOADS,
    LoadRequest,
    WorkloadConfig,
    evenly,
    gamma,
    open_workload,
    poisson,
    timed,
)
from router.workload.trace_formats import AZURE_HEADER

TRACES = Path(__file__).parents[3] / "examples" / "traces"
CONV, MOONCAKE = str(TRACES / "azure_conv.csv"), str(TRACES / "mooncake_conversation.jsonl")


def some(count=20, **settings):
    return list(itertools.islice(open_workload(WorkloadConfig(**settings)).requests, count))


def lengths(requests):
    return (
        [request.input_tokens for request in requests],
        [request.body["max_tokens"] for request in requests],
    )


@pytest.mark.parametrize("name", [*WORKLOADS, CONV, MOONCAKE])
def test_the_same_seed_gives_the_same_requests(name):
    for rate in (None, 5.0):
        one = some(name=name, rate=rate)
        assert len(one) == 20
        assert one == some(name=name, rate=rate) != some(name=name, rate=rate, seed=1)


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_of_two_seeds_share_nothing(name):
    one, other = (some(1, name=name, seed=seed)[0].body["prompt"] for seed in (0, 1))
    assert one[:4] != other[:4]


def test_default_lengths():
    assert {*zip(*lengths(some(name="fixed")), strict=True)} == {(256, 64)}
    inputs, outputs = lengths(some(300, name="long"))
    assert 2048 <= min(inputs) < max(inputs) <= 4096 and set(outputs) == {64}
    assert set(lengths(some(name="prefix-sharing"))[1]) == {128}
    for request in some(5, name="paper"):
        assert len(request.body["prompt"]) == request.input_tokens


def test_the_papers_lengths_are_normal_with_a_deviation_of_5():
    for settings, means in (({}, (3000, 100)), ({"input": 500, "output": 60}, (500, 60))):
        for values, mean in zip(lengths(some(800, name="paper", **settings)), means, strict=True):
            assert abs(statistics.fmean(values) - mean) < 5 * 5 / math.sqrt(800)
            assert abs(statistics.stdev(values) - 5) < 5 * 5 / math.sqrt(2 * 800)


def test_sharegpts_means_are_the_papers():
    """200 tokens in and 260 out (§4.1); the deviations are those of the clipped distribution."""
    inputs, outputs = lengths(some(4000, name="sharegpt"))
    for values, mean, deviation in ((inputs, 200, 248), (outputs, 260, 248)):
        assert abs(statistics.fmean(values) - mean) < 5 * deviation / math.sqrt(4000)
        assert statistics.stdev(values) == pytest.approx(deviation, rel=0.1)
        assert min(values) >= 4 and max(values) == 1024


def test_lengths_are_the_users():
    assert {*zip(*lengths(some(name="fixed", input=7, output=3)), strict=True)} == {(7, 3)}
    inputs, outputs = lengths(some(2000, name="long", input=100, output=3))
    assert (min(inputs), max(inputs), set(outputs)) == (50, 100, {3})
    requests = some(200, name="prefix-sharing", input=50, output=9)
    first = requests[0]
    assert 1024 + 25 <= first.input_tokens <= 1024 + 75
    assert {request.body["max_tokens"] for request in requests} == {9}


def test_requests_come_at_the_rate():
    times = {
        "poisson": poisson(3, 5.0), "fixed": evenly(5.0), "gamma": gamma(3, 5.0, 2.5),
    }  # fmt: skip
    for arrivals, want in times.items():
        cv = 2.5 if arrivals == "gamma" else 1.0
        settings = {"rate": 5.0, "seed": 3, "arrivals": arrivals, "cv": cv}
        for name in ("paper", CONV):
            opened = open_workload(WorkloadConfig(name, **settings))
            assert opened.timed
        requests = some(50, name="fixed", **settings)
        assert [request.at_s for request in requests] == list(itertools.islice(want, 50))


def test_conversations_come_at_the_rate_of_their_requests():
    requests = some(6000, name="prefix-sharing", rate=20.0)
    late = [request.at_s for request in requests if request.at_s > 60.0]  # all turns have begun
    rate = len(late) / (late[-1] - late[0])
    # Sessions are a Poisson process, and turns of one session come together.
    turns = 4 + 4 / 4  # mean square over mean of turns, uniform from 1 to 7
    assert abs(rate / 20.0 - 1) < 5 * math.sqrt(turns / len(late))
    assert len({request.session for request in requests}) > 1000


def test_without_a_rate_requests_have_no_times():
    for name in WORKLOADS:
        opened = open_workload(WorkloadConfig(name))
        assert (opened.kind, opened.count, opened.timed) == (name, None, False)
        assert all(request.at_s is None for request in itertools.islice(opened.requests, 5))


def test_a_trace_brings_its_times_unless_there_is_a_rate():
    opened = open_workload(WorkloadConfig(CONV, speed=2.0))
    assert (opened.kind, opened.count, opened.timed) == ("azure", 500, True)
    assert list(opened.requests)[-1].at_s == pytest.approx(129.012474 / 2, abs=1e-5)
    assert some(2, name=MOONCAKE, scale=0.01)[0].input_tokens == 47
    opened = open_workload(WorkloadConfig(MOONCAKE, rate=10.0, arrivals="fixed"))
    assert (opened.kind, opened.count, opened.timed) == ("mooncake", 239, True)
    requests = list(opened.requests)
    assert [request.at_s for request in requests] == [number / 10 for number in range(239)]


def test_the_first_line_tells_the_kind_of_a_file(tmp_path):
    path = tmp_path / "file"
    record = {"at_s": 3.0, "input_tokens": 5, "output_tokens": 2, "pages": [], "session": "s"}
    path.write_text(f"\n{json.dumps(record)}\n")
    opened = open_workload(WorkloadConfig(str(path)))
    assert (opened.kind, opened.count, opened.timed) == ("recorded", 1, True)
    [request] = opened.requests
    assert (request.at_s, request.input_tokens, request.session) == (0.0, 5, "s")
    path.write_text('"hello"\n{"prompt": "you", "max_tokens": 3}\n')
    opened = open_workload(WorkloadConfig(str(path), output=9))
    assert (opened.kind, opened.count, opened.timed) == ("jsonl", None, False)
    limits = [request.body["max_tokens"] for request in itertools.islice(opened.requests, 4)]
    assert limits == [9, 3, 9, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "file: the file is empty"), ("\n\n", "file: the file is empty"),
        ("hello\n", "file:1: neither a line of a trace nor a request body"),
        ("\n3\n", "file:2: neither a line"), ("{}\n", "file:1: neither a line"),
        ('{"timestamp": 3', "file:1: neither a line"),
        ('{"timestamp": 3}', "file:1: no line of the format mooncake: .*input_length"),
        ('{"at_s": 3}', "file:1: no line of the format recorded: .*input_tokens"),
        (f"{AZURE_HEADER}\n1,2\n", "file:2: no line of the format azure: want TIMESTAMP"),
        ('"hello"\n3\n', "file:2: want an object with prompt or messages"),
    ],
)  # fmt: skip
def test_files_that_are_no_workload(tmp_path, text, message):
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(BadRequest, match=message) as caught:
        open_workload(WorkloadConfig(str(path)))
    assert "\n" not in caught.value.message


def test_names_that_are_no_workload(tmp_path):
    with pytest.raises(BadRequest, match=r"papers is no file and none of .*paper, sharegpt"):
        open_workload(WorkloadConfig("papers"))
    with pytest.raises(BadRequest, match=str(tmp_path)):
        open_workload(WorkloadConfig(str(tmp_path)))
    (tmp_path / "binary").write_bytes(b"\x80\x00\xff")
    with pytest.raises(BadRequest, match="binary:1: no UTF-8 text"):
        open_workload(WorkloadConfig(str(tmp_path / "binary")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cv": 2.0, "rate": 1.0}, "cv has no effect on poisson arrivals"),
        ({"cv": 2.0, "rate": 1.0, "arrivals": "fixed"}, "cv has no effect on fixed arrivals"),
        ({"arrivals": "gamma"}, "gamma arrivals need a rate"),
        ({"name": CONV, "arrivals": "fixed"}, "fixed arrivals need a rate"),
        ({"speed": 2.0}, "speed has no effect on the workload fixed"),
        ({"name": "paper", "scale": 2.0}, "scale has no effect on the workload paper"),
        ({"name": "sharegpt", "input": 3}, "input has no effect on the workload sharegpt"),
        ({"name": "sharegpt", "output": 3}, "output has no effect on the workload sharegpt"),
        ({"name": CONV, "input": 3}, "input has no effect on a trace"),
        ({"name": CONV, "output": 3}, "output has no effect on a trace"),
        ({"name": CONV, "rate": 3.0, "speed": 2.0}, "speed has no effect on a trace at another"),
        ({"input": 2**25}, "at most"), ({"name": "prefix-sharing", "output": 2**25}, "at most"),
    ],
)  # fmt: skip
def test_settings_without_effect_are_refused(settings, message):
    with pytest.raises(BadRequest, match=message):
        open_workload(WorkloadConfig(**settings))


def test_settings_without_effect_on_bodies_are_refused(tmp_path):
    path = tmp_path / "bodies"
    path.write_text('"hello"\n')
    for settings in ({"input": 3}, {"speed": 2.0}, {"scale": 2.0}):
        with pytest.raises(BadRequest, match="has no effect on a file of request bodies"):
            open_workload(WorkloadConfig(str(path), **settings))


def test_timed_ends_with_the_shorter_one():
    requests = [LoadRequest({"prompt": [1]}, 1), LoadRequest({"prompt": [2]}, 1)]
    assert [request.at_s for request in timed(iter(requests), iter([0.5]))] == [0.5]
    assert [request.at_s for request in timed(iter(requests), evenly(2.0))] == [0.0, 0.5]


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadRequest, match="pipe: no regular file"):
        open_workload(WorkloadConfig(name=str(tmp_path / "pipe")))


def test_a_name_too_long_for_a_file_is_unknown():
    with pytest.raises(BadRequest, match="is no file and none of the workloads"):
        open_workload(WorkloadConfig(name="a" * 5000))


def test_a_line_has_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr("router.workload.files.MOST_BYTES", 100)
    path = tmp_path / "trace"
    for length in (100, 101):
        path.write_text('"' + "a" * (length - 2) + '"')
        if length == 100:
            assert open_workload(WorkloadConfig(name=str(path))).kind == "jsonl"
            continue
        with pytest.raises(BadRequest, match=r"trace:1: a line has 100 bytes at most"):
            open_workload(WorkloadConfig(name=str(path)))

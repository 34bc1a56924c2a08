"""The model `mock`: the whole protocol in real processes, and `/v1/completions`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from engine_process import EngineProcess

from engine.protocol import page_names

pytestmark = pytest.mark.processes

PROMPT = list(range(40))
FLAGS = ("--step-ms", "0", "--prefill-tokens-per-ms", "0")


@pytest.fixture(scope="module")
def mocks() -> Iterator[list[EngineProcess]]:
    """Two mock engines whose steps take no time."""
    engines = [EngineProcess(*FLAGS, model="mock") for _ in range(2)]
    yield engines
    for engine in engines:
        engine.kill()


def tokens(events: list[dict[str, object]]) -> list[int]:
    return [token for event in events for token in event["token_ids"]]


@pytest.mark.slow
def test_tokens_depend_on_the_position_alone(mocks: list[EngineProcess]):
    events = mocks[0].generate(PROMPT, max_tokens=50)
    text = "".join(event["text"] for event in events)
    assert "quick brown fox" in text
    assert events[-1]["usage"] == {
        "prompt_tokens": 40, "completion_tokens": 50, "cached_tokens": 0,
    }  # fmt: skip
    output = tokens(events)
    later = mocks[1].generate([5] * 40, max_tokens=50, output=output[:20])
    assert tokens(later) == output[20:]
    mocks[0].at_rest()


def test_leases_and_puts_are_real(mocks: list[EngineProcess]):
    sender, receiver = mocks
    prompt = [7 * n % 200 for n in range(100)]
    whole = tokens(sender.generate(prompt[:64]))
    assert len(whole) == 4
    lease = receiver.post("prep_recv", request_id="a", prompt=prompt, end=99).json()
    assert receiver.state()["pages"]["leased"] == 7
    body = {"request_id": "a", "prompt": prompt, "begin": 0, "end": 99}
    sent = sender.post("remote_send", kv_addr=lease["kv_addr"], **body).json()
    assert (sent["sent_tokens"], sent["cached_tokens"], sent["computed_tokens"]) == (99, 64, 35)
    assert sent["bytes"] == 99 * 16
    again = sender.post("remote_send", kv_addr=lease["kv_addr"], **body)
    assert again.json()["error"]["type"] == "bad_range"  # the watermark is at 99
    events = receiver.generate(prompt, request_id="a", begin=99, lease_id=lease["lease_id"])
    assert events[0]["begin"] == 99
    assert tokens(events) == tokens(sender.generate(prompt))
    for engine in mocks:
        engine.at_rest()


def test_logprobs_are_certain(mocks: list[EngineProcess]):
    events = mocks[0].generate(PROMPT, logprobs=1)
    assert [event["logprobs"][0]["logprob"] for event in events] == [0.0] * 4


def test_the_prefix_feed_reports_cached_pages(mocks: list[EngineProcess]):
    prompt = [9 * n % 200 for n in range(50)]
    with mocks[0].http.stream("GET", "/microserving/prefixes") as reply:
        lines = reply.iter_lines()
        there = json.loads(next(lines))
        mocks[0].generate(prompt)
        change = json.loads(next(lines))
    assert not set(there["added"]) & set(page_names(prompt, 16))
    assert change == {"added": page_names(prompt, 16), "removed": []}


@pytest.mark.slow
def test_steps_take_the_configured_time():
    engine = EngineProcess("--step-ms", "20", "--prefill-tokens-per-ms", "1", model="mock")
    try:
        began = time.monotonic()
        assert len(engine.generate([1] * 101, max_tokens=11)) == 11
        # 100 + 11 * 20 ms, less up to one step of catching up. The delay depends on the machine.
        assert time.monotonic() - began >= 0.300
    finally:
        engine.kill()


def test_completions_for_other_routers(mocks: list[EngineProcess]):
    engine = mocks[0]
    body = {"model": "mock", "prompt": "hello", "max_tokens": 8, "temperature": 0}
    whole = engine.http.post("/v1/completions", json=body).json()
    assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}
    with engine.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line)["choices"][0] for line in lines]
    assert "".join(chunk["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert chunks[-1]["finish_reason"] == "length"
    assert engine.http.get("/v1/models").json()["data"][0]["id"] == "mock"
    for bad in (
        {"prompt": 7}, {"prompt": []}, {"prompt": [-1]}, {"prompt": [2**70]},
        {"prompt": "a", "max_tokens": 0}, {"prompt": "a", "stop": [""]},
    ):  # fmt: skip
        refused = engine.http.post("/v1/completions", json=bad)
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "bad_request"), bad


@pytest.mark.slow
def test_a_disconnect_ends_the_completion():
    engine = EngineProcess("--step-ms", "10", model="mock")
    try:
        body = {"prompt": "hello", "max_tokens": 5000, "stream": True}
        with engine.http.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()  # dropping the reference would close the response
            next(lines)
            assert engine.state()["running"] == 1
        engine.at_rest()
    finally:
        engine.kill()


def test_grammars_are_refused(mocks: list[EngineProcess]):
    wanted = {"kind": "regex", "source": "a", "param": "guided_regex"}
    (event,) = mocks[0].generate([1, 2, 3], structure=wanted)
    assert event["error"]["param"] == "guided_regex"
    assert event["error"]["type"] == "bad_request"

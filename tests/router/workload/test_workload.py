"""Workloads and arrival times: the same seed gives the same requests."""

from __future__ import annotations

import itertools
import json
import statistics

import pytest

from engine.protocol import BadRequest
from router.workload.arrivals import evenly, poisson
from router.workload.workload import fixed, jsonl, long, mooncake, sharegpt


def some(asks, count=2000):
    return list(itertools.islice(asks, count))


def test_the_same_seed_gives_the_same_requests():
    for make in (lambda s: fixed(s, 7, 3), sharegpt, lambda s: long(s, 100, 3)):
        assert some(make(1), 20) == some(make(1), 20) != some(make(2), 20)
    assert some(poisson(1, 5)) == some(poisson(1, 5)) != some(poisson(2, 5))


def test_lengths_follow_their_distributions():
    assert {(ask.input_tokens, len(ask.body["prompt"])) for ask in some(fixed(0, 7, 3))} == {(7, 7)}
    lengths = [ask.input_tokens for ask in some(long(0, 100, 3))]
    assert (min(lengths), max(lengths)) == (50, 100)
    asks = some(sharegpt(0))
    assert 180 < statistics.mean(ask.input_tokens for ask in asks) < 240
    assert 170 < statistics.mean(ask.body["max_tokens"] for ask in asks) < 220
    assert statistics.median(ask.input_tokens for ask in asks) == pytest.approx(94, rel=0.1)


def test_arrivals():
    assert some(evenly(4), 3) == [0, 0.25, 0.5]
    gaps = [later - earlier for earlier, later in itertools.pairwise(some(poisson(0, 4)))]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.1)
    # In an exponential distribution the deviation equals the mean.
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)


def test_a_mooncake_trace_keeps_times_lengths_and_shared_prefixes(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 2000, "input_length": 1100, "output_length": 30, "hash_ids": [1, 2, 4]},
        {"timestamp": 1000, "input_length": 1200, "output_length": 20, "hash_ids": [1, 2, 3]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = mooncake(path, 0, 1.0)
    assert (first.at_s, second.at_s) == (0, 1)
    assert (len(first.body["prompt"]), first.body["max_tokens"]) == (1200, 20)
    assert first.body["prompt"][:1024] == second.body["prompt"][:1024]
    assert first.body["prompt"][1024:1100] != second.body["prompt"][1024:]
    small, _ = mooncake(path, 0, 1 / 16)
    assert (small.input_tokens, len(small.body["prompt"])) == (75, 75)
    for bad in ("{", '{"timestamp": 1}', ""):
        path.write_text(bad)
        with pytest.raises(BadRequest):
            mooncake(path, 0, 1.0)


def test_bodies_from_a_file(tmp_path):
    path = tmp_path / "asks.jsonl"
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    path.write_text(f'"hello"\n{json.dumps(chat)}\n\n{{"prompt": [1, 2]}}\n')
    bodies = [ask.body for ask in some(jsonl(path, 9), 4)]
    assert bodies == [
        {"prompt": "hello", "max_tokens": 9}, chat, {"prompt": [1, 2], "max_tokens": 9},
        {"prompt": "hello", "max_tokens": 9},
    ]  # fmt: skip
    for bad in ("{}", "3", "{", "", '{"prompt": "a", "messages": []}'):
        path.write_text(bad)
        with pytest.raises(BadRequest):
            jsonl(path, 9)

"""`microserve bench`: its workloads, schedules and statistics, and a run against a router."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics

import pytest
from click.testing import CliRunner

from engine.protocol import BadRequest, NoCapacity
from router.cli import cli
from router.load.arrivals import evenly, poisson
from router.load.client import Outcome
from router.load.report import Slo, percentile, summarize
from router.load.workload import fixed, jsonl, long, mooncake, sharegpt


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


def outcome(first: float | None, *gaps: float, status: int = 200) -> Outcome:
    done = Outcome(10, 0.0, status, "" if status == 200 else "no")
    if first is not None:
        done.first_token_s, done.gaps_s = first, list(gaps)
        done.output_tokens, done.end_s = 1 + len(gaps), first + sum(gaps)
    return done


def test_goodput_counts_requests_that_meet_both_objectives():
    outcomes = [
        outcome(0.1, 0.01, 0.03),  # meets both: 20 ms a token on average
        outcome(0.1, 0.05, 0.05),  # slow tokens
        outcome(0.9, 0.01, 0.01),  # slow first token
        outcome(0.2),  # a single token has no time per token
        outcome(None, status=429), outcome(None, status=500), outcome(None),
    ]  # fmt: skip
    figures = summarize(outcomes, Slo(ttft_ms=200, tpot_ms=20))
    assert figures["attained"] == pytest.approx(2 / 7)
    assert figures["attained_ttft"] == figures["attained_tpot"] == pytest.approx(3 / 7)
    assert (figures["completed"], figures["rejected"], figures["errors"]) == (4, 1, 2)
    assert figures["goodput_per_s"] == pytest.approx(2 / 0.92)
    assert figures["error_messages"] == {"no": 1, "no token": 1}
    assert figures["itl_ms"]["p99"] == pytest.approx(50)
    assert summarize([], Slo())["ttft_ms"]["p50"] is None


def test_percentiles_are_by_nearest_rank():
    values = list(range(1, 101))
    assert [percentile(values, p) for p in (50, 90, 99, 100)] == [50, 90, 99, 100]
    assert percentile([7.0], 50) == percentile([7.0], 99) == 7.0


async def bench(r, *flags: str) -> dict:
    """Run the bench; return the JSON document on its last line."""
    arguments = ["bench", "--url", r.server.url, *flags]
    result = await asyncio.to_thread(CliRunner().invoke, cli, arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


async def test_a_run(route, fake, tmp_path):
    a = fake("a")
    async with route(a, api_key="k") as r:
        key = ("--api-key", "k")
        closed = await bench(
            r, *key, "--requests", "20", "--input", "30", "--output", "5", "--concurrency", "4",
            "--slo-ttft-ms", "10000",
        )  # fmt: skip
        assert (closed["requests"], closed["completed"], closed["attained"]) == (20, 20, 1.0)
        assert closed["output_tokens_per_s"] == pytest.approx(5 * 20 / closed["seconds"])
        assert all(len(body["prompt"]) == 30 for body in a.named("start_generate"))
        assert "k" not in json.dumps(closed["settings"].get("api_key", ""))
        opened = await bench(
            r, *key, "--requests", "10", "--rate", "100", "--input", "30", "--output", "5"
        )
        assert opened["completed"] == 10
        sent = [body["prompt"] for body in a.named("start_generate")]
        assert sorted(sent[:10]) == sorted(sent[20:])  # same seed, same requests
        path = tmp_path / "trace"
        row = {"timestamp": 5, "input_length": 20, "output_length": 4, "hash_ids": [1]}
        path.write_text(f"{json.dumps(row)}\n" * 3)
        trace = await bench(r, *key, "--workload", "mooncake", "--file", str(path))
        assert trace["completed"] == 3
        a.refuse["start_generate"] = [NoCapacity("full")] * 100
        listed = await asyncio.to_thread(CliRunner().invoke, cli, ["bench", "--url", r.server.url])
        assert listed.exit_code == 1 and "use --api-key" in listed.output
        limited = await bench(r, "--requests", "2", "--model", "fake")
        assert limited["errors"] == 2 and "key" in next(iter(limited["error_messages"]))


async def test_rejections_are_no_errors(route, fake):
    a = fake("a", refuse={"start_generate": [NoCapacity("full")] * 3})
    async with route(a, max_queue=0) as r:
        figures = await bench(r, "--requests", "5", "--input", "30", "--output", "2")
        assert (figures["rejected"], figures["completed"], figures["errors"]) == (3, 2, 0)


def test_incompatible_options_and_dead_urls_are_errors():
    for flags in (["--workload", "mooncake"], ["--file", __file__]):
        result = CliRunner().invoke(cli, ["bench", *flags])
        assert result.exit_code == 1 and "--file goes with" in result.output
    result = CliRunner().invoke(cli, ["bench", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1 and "Traceback" not in result.output

"""`microserve bench`: its statistics, and a run against a router."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner

from engine.protocol import NoCapacity
from router.cli import cli
from router.load.client import Outcome
from router.load.report import Slo, percentile, summarize


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

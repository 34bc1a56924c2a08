"""`microserve bench`: its statistics, and a run against a router."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from engine.protocol import NoCapacity
from router.cli import cli
from router.load.client import Outcome, Target, open_loop
from router.load.report import summarize
from router.telemetry import Slo, percentile
from router.workload import LoadRequest


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


async def test_workloads_of_a_run(route, fake, tmp_path):
    a = fake("a")
    a.info = a.info.model_copy(update={"context_length": 30_000, "vocab_size": 32_000})
    traces = Path(__file__).parents[3] / "examples" / "traces"
    few = ("--requests", "4", "--rate", "200")
    async with route(a) as r:

        async def sent(*flags: str) -> list[dict]:
            before = len(a.named("start_generate"))
            assert (await bench(r, *flags))["completed"] == 4
            return a.named("start_generate")[before:]

        bursts = ("--arrivals", "gamma", "--cv", "3")
        for body in await sent("--workload", "paper", *few, *bursts):
            assert abs(len(body["prompt"]) - 3000) < 50
        bodies = await sent("--workload", "prefix-sharing", *few)
        assert len({tuple(body["prompt"][:1024]) for body in bodies}) == 1
        for path, lengths in (
            (traces / "azure_conv.csv", [374, 396, 879, 91]),
            (traces / "mooncake_conversation.jsonl", None),
        ):
            bodies = await sent("--workload", str(path), "--requests", "4", "--speed", "1000")
            assert lengths is None or sorted(lengths) == sorted(len(b["prompt"]) for b in bodies)
        path = tmp_path / "recorded"
        record = {"at_s": 9, "input_tokens": 20, "output_tokens": 4, "pages": ["0" * 16]}
        path.write_text(f"{json.dumps(record)}\n" * 4)
        bodies = await sent("--workload", str(path), "--scale", "2")
        assert {len(body["prompt"]) for body in bodies} == {40}


async def test_a_request_of_a_session_names_it():
    sent = []

    class Client:
        async def call(self, method, path, body, headers, *, sink):
            sent.append(headers)
            return SimpleNamespace(status=200, body=b"")

    target = Target(Client(), "m")
    requests = [LoadRequest({"prompt": [1]}, 1, 0.0, session) for session in ("mine", None)]
    await open_loop(target, iter(requests))
    assert sent == [{"X-Session-ID": "mine"}, {}]


def test_incompatible_options_and_dead_urls_are_errors():
    azure = str(Path(__file__).parents[3] / "examples" / "traces" / "azure_conv.csv")
    for flags, message in (
        (["--workload", "mooncake"], "--file goes with"),
        (["--file", __file__], "--file goes with"),
        (["--workload", azure, "--file", azure], "--file goes with"),
        (["--workload", "mooncake", "--file", azure], "is of the kind azure, not mooncake"),
        (["--workload", "papers"], "papers is no file and none of the workloads"),
        (["--workload", __file__], "test_load.py:1: neither a line of a trace"),
        (["--rate", "3", "--cv", "2"], "cv has no effect"),
        (["--arrivals", "gamma"], "gamma arrivals need a rate"),
    ):
        result = CliRunner().invoke(cli, ["bench", *flags])
        assert result.exit_code == 1 and message in result.output
        assert len(result.output.strip().splitlines()) == 1
    result = CliRunner().invoke(cli, ["bench", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1 and "Traceback" not in result.output

"""`microserve simulate`: what it prints, what it refuses, and that a seed decides everything."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from chrome_trace_rules import read_trace
from click.testing import CliRunner, Result

from engine.latency import FixedLatency, Profile, PutLatency, write_profile
from router.cli import cli

FAST = ("--requests", "12", "--output", "4", "--input", "40")


@pytest.fixture
def fleet(tmp_path: Path) -> str:
    """Two engines of a made-up profile."""
    profile = Profile(
        name="made-up", model="made-up", device="none", gpus=0, source="made up", layers=2,
        kv_bytes_per_token=1000, context_length=4096, pool_tokens=1 << 14,
        step=FixedLatency(10.0, 10.0), put=PutLatency(bandwidth=1e9, layer_s=1e-4),
    )  # fmt: skip
    path = tmp_path / "profile.json"
    write_profile(profile, path)
    return f"2x{path}"


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["simulate", *arguments], terminal_width=120)


def document(result: Result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_a_table_per_rate_and_a_last_line_of_json(fleet):
    result = simulate(
        "data_parallel", "--compare", "prefill_decode", "balanced:ratio=0.5", "--fleet", fleet,
        "--rate", "5,20", "--slo-ttft-ms", "30", *FAST,
    )  # fmt: skip
    found = document(result)
    assert found["simulate"] == ["data_parallel", "prefill_decode", "balanced:ratio=0.5"]
    settings = [(run["rate"], run["strategy"]) for run in found["runs"]]
    assert settings == [(rate, name) for rate in (5, 20) for name in found["simulate"]]
    assert found["runs"][2]["params"] == {"ratio": 0.5}
    assert all(run["completed"] == 12 and len(run["engines"]) == 2 for run in found["runs"])
    assert [best["rate"] for best in found["best"]] == [5, 20]
    for title in ("5 requests/s", "20 requests/s"):
        assert title in result.stdout
    assert result.stdout.count("★") == 2
    assert f"{found['best'][0]['strategy']}: 90% attained up to" in result.stdout


def test_the_best_strategy_has_most_goodput(fleet):
    """Puts add some time to the first token, so an objective between the two decides."""
    found = document(
        simulate("prefill_decode", "--compare", "data_parallel", "--fleet", fleet, "--rate", "1",
                 "--slo-ttft-ms", "15.5", *FAST)
    )  # fmt: skip
    attained = {run["strategy"]: run["attained"] for run in found["runs"]}
    assert attained == {"prefill_decode": 0.0, "data_parallel": 1.0}
    assert found["best"] == [{"rate": 1, "strategy": "data_parallel"}]
    assert found["goodput"] == {"prefill_decode": None, "data_parallel": 1}


def test_separate_objectives_and_their_scale(fleet):
    options = ("data_parallel", "--fleet", fleet, "--rate", "40", "--slo-ttft-ms", "20",
               "--slo-tpot-ms", "10", *FAST)  # fmt: skip
    joint, separate = (
        document(simulate(*options, "--slo", how))["runs"][0] for how in ("joint", "separate")
    )
    assert separate["attained"] == min(joint["attained_ttft"], joint["attained_tpot"])
    assert joint["attained"] < separate["attained"] < 1
    lax = document(simulate(*options, "--slo-scale", "100"))["runs"][0]
    assert lax["attained"] == 1 and lax["slo"]["ttft_ms"] == 2000


def test_seeds_show_the_spread(fleet):
    result = simulate("data_parallel", "--fleet", fleet, "--rate", "30", "--seeds", "3", *FAST)
    runs = document(result)["runs"]
    assert [run["seed"] for run in runs] == [0, 1, 2]
    assert len({run["jct_ms"]["mean"] for run in runs}) == 3
    assert "±" in result.stdout


@pytest.mark.parametrize("columns", ["80", "110", "200", ""])
def test_a_table_has_all_of_it_at_any_width(fleet, monkeypatch, columns):
    """Names are folded on narrow terminals; a pipe gets the whole table, without limit."""
    monkeypatch.setenv("COLUMNS", columns)
    long = "balanced:ratio=0.3333333333333333333333333333"
    result = simulate("cache_aware:load_weight=0.25", "--compare", long, "data_parallel", "--fleet",
                      fleet, "--rate", "30", "--seeds", "3", *FAST)  # fmt: skip
    lines = result.stdout.splitlines()[:-1]
    assert document(result)["simulate"][1] == long
    assert max(map(len, lines)) <= int(columns or 1000)
    assert "…" not in "".join(lines)
    headings = " ".join(lines)
    for heading in ("mean", "P99", "attained", "goodput/s", "KV peak", "put GB"):
        assert heading in headings
    starred = {line.split()[1] for line in lines if line.startswith("★")}
    best = document(result)["best"][0]["strategy"]
    assert starred and all(best.startswith(name) for name in starred)
    assert sum("data_parallel" in line and "TTFT" in line for line in lines) == 1
    if columns in ("200", ""):  # one line has it all
        assert any(long in line and "TTFT" in line and "%" in line for line in lines)
    names = "".join(line[3:].split("  ")[0] for line in lines)
    assert "load_weight=0.25" in names and "3333333333" in names


def test_a_single_run_shows_its_engines_and_deaths(fleet):
    result = simulate("data_parallel", "--fleet", fleet, "--rate", "5", "--kill", "engine-1@1.1",
                      *FAST)  # fmt: skip
    assert [engine["died"] for engine in document(result)["runs"][0]["engines"]] == [False, True]
    assert "engine-1 (died)" in result.stdout


def test_a_trace_has_its_own_times(fleet, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000 * i, "input_length": 40, "output_length": 3, "hash_ids": [i]}
        for i in range(4)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = document(simulate("data_parallel", "--fleet", fleet, "--workload", str(trace)))["runs"][0]
    assert run["requests"] == 4 and 3 < run["seconds"] < 3.2 and run["rate"] is None


def test_a_time_line_of_steps_puts_and_requests(fleet, tmp_path):
    path = tmp_path / "trace.json"
    document(
        simulate("prefill_decode", "--fleet", fleet, "--prefill", "1", "--decode", "1", "--rate",
                 "20", "--trace", str(path), *FAST)
    )  # fmt: skip
    file = read_trace(path)
    assert [*file.processes.values()] == ["requests", "prefill-0 (prefill)", "decode-0 (decode)"]
    assert len(file.of("requests", "requests")) == 12
    sends = [one for one in file.of("prefill-0 (prefill)", "calls") if one["name"] == "remote_send"]
    assert len(sends) == 12
    puts = file.of("prefill-0 (prefill)", "puts")
    assert {put["name"] for put in puts} == {"put to decode-0"}
    assert sum(put["args"]["bytes"] for put in puts) == 12 * 39 * 1000
    for engine in ("prefill-0 (prefill)", "decode-0 (decode)"):
        steps = file.of(engine, "steps")
        assert steps and len({one["tid"] for one in steps}) == 1  # steps do not overlap
    for number in file.flows:
        names = [one["name"] for one in file.joined(number)]
        assert names[0].startswith("request ")
        assert names[1:] == ["prep_recv", "remote_send", "start_generate"]
    assert len(file.flows) == 12


BAD = {
    "an unknown profile": (("--fleet", "2xnothing"), "no profile is called 'nothing'; there are"),
    "no fleet": (("--fleet", "0xopt-13b@a100"), "'0xopt-13b@a100' is no fleet: want NxPROFILE"),
    "two models": (("--fleet", "opt-13b@a100,llama-3.1-8b@a100"), "a fleet serve one model, not"),
    "more roles than engines": (("--fleet", "opt-13b@a100", "--prefill", "2"), "are more than"),
    "an unknown strategy": (("--compare", "fastest"), "no strategy 'fastest'; there are: "),
    "a parameter that is none": (("--param", "speed=9"), "strategy data_parallel: "),
    "twice the same": (("--compare", "data_parallel"), "data_parallel is given twice"),
    "no workload": (("--workload", "nothing"), "nothing is no file and none of the workloads"),
    "a death of nobody": (("--kill", "engine-7@1"), "no engine 'engine-7' can die; there are"),
    "a death at no time": (("--kill", "engine-0"), "want ENGINE@SECONDS, such as engine-0@12.5"),
    "a scale of nothing": (("--slo-scale", "2"), "--slo-scale needs --slo-ttft-ms or"),
    "a time line of many": (("--rate", "1,2", "--trace", "x"), "--trace shows a single run"),
    "no folder": (("--trace", "/nowhere/x"), "there is no folder /nowhere"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", BAD)
def test_bad_input_gets_one_sentence(fleet, mistake):
    arguments, said = BAD[mistake]
    given = [*(() if "--fleet" in arguments else ("--fleet", fleet)), "--rate", "1", *FAST]
    result = simulate("data_parallel", *given, *arguments)
    assert result.exit_code == 2 and not result.stdout
    assert result.stderr.startswith("Error: ") and said in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_named_workload_needs_a_rate(fleet):
    result = simulate("data_parallel", "--fleet", fleet)
    assert result.exit_code == 2 and "has no times of its own: give --rate" in result.stderr


@pytest.mark.parametrize("rate", ["0", "1,-2", "fast", "1,,2", "nan"])
def test_a_rate_is_positive(fleet, rate):
    result = simulate("data_parallel", "--fleet", fleet, "--rate", rate)
    assert result.exit_code == 2 and "'--rate'" in result.stderr


def test_a_broken_line_of_a_trace_is_named(fleet, tmp_path):
    trace = tmp_path / "trace.jsonl"
    good = {"timestamp": 0, "input_length": 40, "output_length": 3, "hash_ids": [1]}
    trace.write_text(json.dumps(good) + "\n{broken\n")
    result = simulate("data_parallel", "--fleet", fleet, "--workload", str(trace))
    assert result.exit_code == 2 and f"{trace}:2: " in result.stderr


def test_a_file_that_does_not_load_and_one_that_hangs(fleet, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from router import strategy\n1 / 0\n")
    result = simulate(str(file), "--fleet", fleet, "--rate", "1", *FAST)
    assert result.exit_code == 2 and f"{file}:2: ZeroDivisionError" in result.stderr
    file.write_text(
        "import asyncio\nfrom router import Chunk, strategy\n\n@strategy\n"
        "async def mine(request, cluster):\n    await asyncio.sleep(1e9)\n    yield Chunk()\n"
    )
    result = simulate(str(file), "--fleet", fleet, "--rate", "1", *FAST)
    assert result.exit_code == 2 and "strategy mine made no progress for" in result.stderr
    assert "(mine.py:6)" in result.stderr


def test_a_picture_without_matplotlib_is_refused_before_anything_runs(fleet, tmp_path, monkeypatch):
    imported = builtins.__import__

    def without(name, *rest, **options):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return imported(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    plot = ("--plot", str(tmp_path / "x.png"))
    result = simulate("data_parallel", "--fleet", fleet, "--rate", "1", *plot, *FAST)
    assert result.exit_code == 2 and not result.stdout
    assert result.stderr == "Error: --plot needs matplotlib: pip install 'microserve[plot]'\n"


def test_a_picture(fleet, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "x.png"
    document(simulate("data_parallel", "--fleet", fleet, "--rate", "1,5", "--plot", str(path),
                      *FAST))  # fmt: skip
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.processes
@pytest.mark.slow
def test_the_same_seed_gives_the_same_result_to_the_bit(fleet):
    """In two processes, with other hashes of strings, and addresses of objects."""
    command = [
        sys.executable, "-m", "router", "simulate", "prefill_decode", "--compare", "replicate",
        "cache_aware", "balanced:ratio=auto", "--fleet", fleet.replace("2x", "5x", 1), "--prefill",
        "2", "--decode", "2", "--workload", "prefix-sharing", "--rate", "40", "--requests", "30",
        "--input", "30", "--output", "20", "--kill", "decode-0@0.5", "--pool-pages", "500",
    ]  # fmt: skip
    printed = [
        subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=120,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert printed[0] == printed[1]
    runs = json.loads(printed[0].splitlines()[-1])["runs"]
    assert sum(run["retries"] for run in runs) > 0 and all(run["put_bytes"] for run in runs[:2])


@pytest.mark.parametrize("tokens", ["-5", "2.5", "true", "null", '"many"', "1e400"])
def test_a_body_with_impossible_tokens_is_one_sentence(tmp_path, fleet, tokens):
    bodies = tmp_path / "bodies.jsonl"
    bodies.write_text(f'{{"prompt": [1, 2], "max_tokens": {tokens}}}')
    result = simulate("data_parallel", "--fleet", fleet, "--rate", "1", "--workload", str(bodies))
    assert result.exit_code == 2
    assert "Error: request 0 of the workload: max_tokens: Input should be" in result.output


@pytest.mark.parametrize("token", [-(10**20), -1, 10**20])
def test_any_whole_number_is_a_token(tmp_path, fleet, token):
    bodies = tmp_path / "bodies.jsonl"
    bodies.write_text(json.dumps({"prompt": [token] * 40, "max_tokens": 2}))
    found = document(
        simulate("cache_aware", "--fleet", fleet, "--rate", "9", "--workload", str(bodies),
                 "--requests", "3")
    )  # fmt: skip
    assert found["runs"][0]["completed"] == 3


@pytest.mark.parametrize("name", ["picture", "picture.", "picture.xyz"])
def test_a_picture_of_an_unknown_kind_is_refused_before_the_runs(tmp_path, fleet, name):
    pytest.importorskip("matplotlib")
    result = simulate(
        "data_parallel", "--fleet", fleet, "--rate", "1", "--plot", str(tmp_path / name)
    )
    assert result.exit_code == 2 and "want a name that ends in one of .avif" in result.output
    assert "requests/s" not in result.output and not list(tmp_path.glob("picture*"))


def test_seeds_beyond_memory_begin_all_the_same(fleet, monkeypatch):
    class Begun(Exception):
        pass

    def run_experiment(*_, **__):
        raise Begun

    module = sys.modules["router.cli.simulate"]
    monkeypatch.setattr(module, "run_experiment", run_experiment)
    result = simulate("data_parallel", "--fleet", fleet, "--rate", "1", "--seeds", str(10**15))
    assert isinstance(result.exception, Begun)


@pytest.mark.parametrize("flags", [("--pool-pages", "1000000000000"), ("--page-size", "1")])
def test_pools_beyond_memory_are_refused(tmp_path, fleet, flags):
    path = Path(fleet.removeprefix("2x"))
    path.write_text(
        path.read_text().replace(f'"pool_tokens": {1 << 14}', f'"pool_tokens": {1 << 62}')
    )
    result = simulate("data_parallel", "--fleet", fleet, "--rate", "1", *flags)
    assert result.exit_code == 2 and "a fleet has 67108864 pages at most, not" in result.output

"""`microserve plan`: what it prints, and what it refuses in one sentence."""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from engine.latency import FixedLatency, Profile, PutLatency, write_profile
from router.cli import cli

SMALL = (
    "--workload", "fixed", "--input", "512", "--output", "64", "--requests", "120",
    "--slo-ttft-ms", "400", "--slo-tpot-ms", "40",
)  # fmt: skip


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments], terminal_width=120)


def placement(*arguments: str) -> Result:
    return plan("placement", *arguments, *SMALL)


def document(result: Result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_high_affinity_places_each_phase_and_says_how_to_run_it():
    result = placement(
        "opt-13b@a100", "--gpus-per-node", "2", "--nodes", "8", "--affinity", "high", "--rate", "20"
    )
    found = document(result)
    for title in ("prefill alone", "decode alone", "less per GPU", "★"):
        assert title in result.stdout
    for phase in ("prefill", "decode"):
        ranked = found["candidates"][phase]
        assert ranked == sorted(ranked, key=lambda one: -one["per_gpu"]) and len(ranked) > 3
        chosen = found[phase]
        gpus = [ceil(20 / one["goodput"]) * one["gpus"] for one in ranked if one["goodput"]]
        (mine,) = (r for r in ranked if r["candidate"] == f"tp={chosen['tp']} pp={chosen['pp']}")
        assert chosen["instances"] * mine["gpus"] == min(gpus)
        assert chosen["instances"] * mine["goodput"] >= 20
    n, m = found["prefill"]["instances"], found["decode"]["instances"]
    up = f"microserve up '<folder or hub id of opt-13b>' --prefill {n} --decode {m}"
    for phase in ("prefill", "decode"):
        split = [f"--{name} {k}" for name in ("tp", "pp") if (k := found[phase][name]) > 1]
        up += f" --{phase}-flags '{' '.join(split)}'" if split else ""
    up += " --strategy prefill_decode"
    assert found["commands"][0] == up and up in result.stdout
    assert "replace <…> by a model that engines can load" in result.stdout
    assert found["attained"]["ttft"] >= 0.9 and found["attained"]["tpot"] >= 0.9
    assert found["strategy"] == {"name": "prefill_decode", "params": {}}


def test_low_affinity_keeps_a_pair_in_its_nodes_and_simulate_takes_its_fleet():
    result = placement("opt-13b@a100", "--gpus-per-node", "2", "--rate", "4")
    found = document(result)
    assert found["gpus"] == 2 and found["prefill"] == found["decode"]
    assert found["prefill"] == {"instances": 1, "tp": 1, "pp": 1}
    (_, simulate) = found["commands"]
    for flags in ("--input 512 --output 64", "--requests 120", "--rate 4"):
        assert flags in simulate
    simulated = CliRunner().invoke(cli, simulate.split()[1:], terminal_width=120)
    assert document(simulated)["runs"][0]["attained"] >= 0.9


def test_the_star_is_where_the_fewest_gpus_suffice():
    result = placement("opt-13b@a100", "--gpus-per-node", "4", "--rate", "10")
    found = document(result)
    assert found["gpus"] == 2 and found["candidates"]["joint"][0]["gpus"] == 3
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("★"))
    assert "prefill tp=1 pp=1, decode tp=1 pp=1" in line
    assert "as in DistServe, would take 1 x prefill tp=1 pp=2" in result.stdout


@pytest.mark.parametrize("columns", ["80", "110", ""])
def test_the_table_is_whole_at_any_width(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    lines = placement("opt-13b@a100", "--gpus-per-node", "4", "--rate", "10").stdout.splitlines()
    table = lines[: next(n for n, line in enumerate(lines) if line.startswith("Goodput per GPU"))]
    assert "…" not in "".join(table) and "needs 1 GPU more" in " ".join(" ".join(table).split())
    assert max(map(len, table)) <= int(columns or 1000)


def test_a_profile_of_an_own_engine_is_one_instance(tmp_path: Path):
    profile = Profile(
        name="made-up", model="tiny", device="none", gpus=0, source="made up", layers=2,
        kv_bytes_per_token=1000, context_length=4096, pool_tokens=1 << 14,
        step=FixedLatency(10.0, 10.0), put=PutLatency(bandwidth=1e9, layer_s=1e-4),
    )  # fmt: skip
    path = tmp_path / "own.json"
    write_profile(profile, path)
    found = document(placement(str(path), "--affinity", "high", "--rate", "30"))
    # A prompt of 512 tokens takes 61 ms, so an instance has less than 17 requests/s.
    assert found["prefill"]["instances"] == 2 and found["decode"]["instances"] == 1
    assert found["commands"][0].startswith("microserve up tiny --prefill 2 --decode 1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("opt-66b@a100", "--gpus-per-node", "1"), "GPU memory: with tp=1 pp=1, the weights take"),
        (("opt-13b@a100", "--gpus-per-node", "1"), "GPUs: prefill and decode together need 2"),
        (("opt-13b@a100", "--gpus-per-node", "4", "--rate", "500"), "and there are 4, which serve"),
        (("opt-13b@a100", "--slo-scale", "0.01"), "meets the objectives, even without load"),
        (("opt-13b", "--rate", "1"), "no device is called ''"),
        (("nothing@a100", "--rate", "1"), "no model is called 'nothing'"),
        (("missing.json", "--rate", "1"), "missing.json: No such file"),
        (("opt-13b@a100", "--rate", "0"), "0 is not from 1e-09"),
        (("opt-13b@a100", "--workload", "gone"), "gone is no file and none of the workloads"),
    ],
)
def test_what_cannot_be_placed_is_one_sentence(arguments, message):
    rate = () if "--rate" in arguments else ("--rate", "4")
    options = SMALL[2:] if "--workload" in arguments else SMALL
    options = options if "gone" not in arguments else options[4:]
    result = plan("placement", *arguments, *rate, *options)
    assert result.exit_code == 2 and message in result.stderr, result.output
    assert "Traceback" not in result.stderr and not result.stdout


def test_machines_are_split_and_makespans_simulated():
    result = plan(
        "pipeline", "opt-66b@a100", "--machines", "8", "--gpus-per-machine", "2", "--batch", "16",
        "--gbps", "400",
    )  # fmt: skip
    found = document(result)
    assert (found["prompt"], found["token"]) == (3, 5)  # DéjàVu, table 2
    assert found["splits"][0][:2] == [3, 5] and found["disaggregation_wins"]
    split, together, *_ = found["simulated"]
    assert split["makespan_s"] < together["makespan_s"] and split["cost"] < together["cost"]
    assert "slower, by its" in result.stdout
    assert found["commands"][0].endswith(
        "--prefill 1 --decode 1 --prefill-flags '--tp 2 --pp 3' --decode-flags '--tp 2 --pp 5' "
        "--strategy prefill_decode"
    )


def test_the_plan_says_where_whole_requests_are_faster():
    arguments = ("opt-66b@a100", "--machines", "8", "--gpus-per-machine", "4")
    result = plan("pipeline", *arguments)
    split, _, several = document(result)["simulated"]
    assert several["makespan_s"] < split["makespan_s"]
    longer = split["makespan_s"] / several["makespan_s"] - 1
    said = f"the split takes {longer:.0%} longer than 8 pipelines of 1 for both"
    assert said in result.stdout and "disaggregation does not win" in result.stdout
    assert several["command"].endswith("--engines 8 --tp 4 --strategy data_parallel")
    assert several["command"] in result.stdout and split["command"] in result.stdout


def test_a_slow_network_is_in_the_prompts_pipeline():
    fast, slow = (
        document(plan("pipeline", "opt-66b@a100", "--machines", "8", "--gpus-per-machine", "2",
                      "--batch", "16", "--gbps", gbps))
        for gbps in ("400", "10")
    )  # fmt: skip
    assert fast["streaming"] == 1.0 < 2.0 < slow["streaming"]
    assert slow["seconds_per_microbatch"] > fast["seconds_per_microbatch"]
    assert not slow["disaggregation_wins"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("opt-66b@a100", "--machines", "2"), "no profile is called opt-66b@a100, so give"),
        (("opt-66b@a100", "--machines", "2", "--prompt-s", "3", "--token-s", "0.1"),
         "machines: prompts need 2 and tokens 3 for their memory, and there are 2"),
        (("opt-66b@a100", "--machines", "99", "--batch", "90", "--prompt-s", "3", "--token-s",
          "0.1"), "GPU memory: the KV of a microbatch takes"),
        (("opt-66b@a100", "--machines", "4", "--gpus-per-machine", "5"), "heads: 72 of them"),
        (("gpt@a100", "--machines", "4"), "'gpt@a100' is not MODEL@DEVICE"),
    ],
)  # fmt: skip
def test_machines_that_are_short_are_named(arguments, message):
    result = plan("pipeline", *arguments)
    assert result.exit_code == 2 and message in result.stderr, result.output
    assert not result.stdout

"""`microserve profile`: it finds the pace of the model `mock`, and says what it cannot measure."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result
from engine_process import EngineProcess

from engine.latency import StepWork, fit_put, read_profile
from router.cli.profile import profile

STEP_MS, TOKENS_PER_MS = 8.0, 20.0
PACE = ("--step-ms", str(STEP_MS), "--prefill-tokens-per-ms", str(TOKENS_PER_MS))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(profile, list(arguments))


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[EngineProcess, EngineProcess]]:
    both = EngineProcess(*PACE, model="mock"), EngineProcess(*PACE, model="mock")
    yield both
    for each in both:
        each.kill()


@pytest.mark.processes
@pytest.mark.slow
def test_the_pace_of_a_mock_engine_is_found(tmp_path, engines):
    engine, peer = engines
    file = tmp_path / "mock.json"
    done = run(engine.url, "--peer", peer.url, "-o", str(file), "--name", "mock@here")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["name"] == "mock@here"
    found = read_profile(file)
    assert (found.model, found.layers) == ("mock", 1)
    assert found.kv_bytes_per_token == 16
    assert found.pool_tokens == engine.state()["pages"]["total"] * 16
    # Other processes may slow a step down. The engine makes up for the time between two prompts, so
    # one may seem shorter than it is. How exact a profile is, `make bench-simulated-engines` says.
    short, long = (found.step.seconds(StepWork(tokens, tokens**2)) * 1e3 for tokens in (16, 512))
    assert 0.6 < (long - short) / (496 / TOKENS_PER_MS) < 4
    assert short < 4 * (STEP_MS + 16 / TOKENS_PER_MS)
    for batch in (1, 32):
        seconds = found.step.seconds(StepWork(0, 0, batch, 100 * batch))
        assert 0.6 < seconds * 1e3 / STEP_MS < 4
    assert found.fit is not None
    assert found.fit.prefill.points > 15 and found.fit.decode.points > 10
    for each in engines:
        each.at_rest()


@pytest.mark.processes
@pytest.mark.thorough
def test_two_engines_of_a_model_are_started_and_end_with_the_command(tmp_path):
    file = tmp_path / "mock.json"
    done = run("mock", *PACE, "-o", str(file))
    assert done.exit_code == 0, done.output
    assert read_profile(file).name == "mock@cpu"
    assert read_profile(file).put.bandwidth < 1e12


@pytest.mark.processes
def test_an_engine_at_work_is_not_measured(engines):
    engine, _ = engines
    stream = engine.stream([1, 2, 3], max_tokens=1000)
    next(stream)
    refused = run(engine.url)
    stream.close()
    engine.at_rest()
    assert refused.exit_code == 1
    assert f"{engine.url} is at work: an engine is profiled while it is idle" in refused.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["http://127.0.0.1:1"], "http://127.0.0.1:1"),
        (["no-such-folder/model"], "no-such-folder"),
        (["mock", "--peer", "http://127.0.0.1:1"], "--peer goes with the URL of an engine"),
        (["mock", "--pool-pages", "-1"], "--pool-pages"),
    ],
)
def test_a_bad_target_is_named_in_one_sentence(arguments, says):
    refused = run(*arguments)
    assert refused.exit_code != 0
    last = refused.stderr.strip().splitlines()[-1]
    assert says in refused.stderr and "Traceback" not in refused.output, refused.output
    assert len(last) < 400


def test_the_fit_of_puts_finds_bandwidth_and_latency():
    puts = [(size, 30 * 4e-5 + size / 2e9) for size in (10_000, 1_000_000, 50_000_000)]
    put = fit_put(puts, 30)
    assert put.bandwidth == pytest.approx(2e9)
    assert put.layer_s == pytest.approx(4e-5)
    assert put.seconds(1_000_000, 30) == pytest.approx(puts[1][1])


def test_a_latency_below_the_noise_is_none():
    put = fit_put([(1000, 1e-6), (2000, 3e-6), (4000, 7e-6)], 2)
    assert put.layer_s == 0.0
    assert put.bandwidth == pytest.approx(2000 / 3e-6)

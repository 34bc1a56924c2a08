"""Workers that are killed, stopped or fail: the streams of their engine go on, token by token."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from engine_process import EngineProcess

SPLITS = [(2, 1), (1, 2), (2, 2)]
FIRST = [(2, 1, 1), (2, 2, 0)]
# Each worker of each split in turn; those after the first ones in `make test-thorough`.
CASES = [
    pytest.param(tp, pp, rank, marks=() if (tp, pp, rank) in FIRST else pytest.mark.thorough)
    for tp, pp in SPLITS
    for rank in range(tp * pp)
]
PROMPTS = [[(7 * number + i * i) % 500 for i in range(5 + 61 * number)] for number in range(4)]


def start(tp: int, pp: int, *flags: str) -> EngineProcess:
    return EngineProcess(
        "--tp", str(tp), "--pp", str(pp), "--pool-pages", "300", "--max-batch", "8", *flags
    )


def workers(process: EngineProcess) -> list[dict]:
    return process.state()["workers"]


def tokens(process: EngineProcess, prompt: list[int], count: int) -> list[int]:
    stream = process.generate(prompt, max_tokens=count)
    return [token for event in stream for token in event["token_ids"]]


def metric(process: EngineProcess, name: str) -> float:
    lines = process.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


@pytest.fixture(scope="module")
def wanted(engine_process) -> list[list[int]]:
    return [tokens(engine_process, prompt, 200) for prompt in PROMPTS]


@pytest.fixture
def engine() -> Iterator[list[EngineProcess]]:
    started: list[EngineProcess] = []
    yield started
    for process in started:
        process.kill()


@pytest.mark.parametrize(("tp", "pp", "rank"), CASES, ids=str)
def test_streams_go_on_when_a_worker_is_killed(engine, wanted, tp: int, pp: int, rank: int):
    """In mid-decode. Nothing is computed again but the steps under way, and nothing is leaked."""
    process = start(tp, pp)
    engine.append(process)
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        answers = [threads.submit(tokens, process, prompt, 200) for prompt in PROMPTS]
        while process.state()["running"] < len(PROMPTS):
            time.sleep(0.01)
        victim = workers(process)[rank]
        os.kill(victim["pid"], signal.SIGKILL)
        assert [answer.result() for answer in answers] == wanted
    after = workers(process)
    assert after[rank]["pid"] != victim["pid"]
    assert [one["restarts"] for one in after] == [int(n == rank) for n in range(tp * pp)]
    computed = sum(len(prompt) - 1 for prompt in PROMPTS)  # the last ones count as decodes
    assert metric(process, "vllm:prompt_tokens_total") == computed
    assert metric(process, "microserve:failed_steps_total") == 0
    assert metric(process, "microserve:worker_restarts_total") == 1
    process.at_rest()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_kv_that_is_swapped_outlives_the_worker(engine, wanted, number: signal.Signals):
    """The worker has memory of its own, which is lost; its tokens came back to the lead's pool."""
    process = start(1, 2, "--device-pages", "60")
    engine.append(process)
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        answers = [threads.submit(tokens, process, prompt, 200) for prompt in PROMPTS]
        while process.state()["running"] < len(PROMPTS):
            time.sleep(0.01)
        before = workers(process)
        os.kill(before[1]["pid"], number)
        assert [answer.result() for answer in answers] == wanted
    after = workers(process)
    assert [one["restarts"] for one in after] == [0, 1]
    assert after[1]["written_bytes"] > before[1]["written_bytes"]
    computed = sum(len(prompt) - 1 for prompt in PROMPTS)
    assert metric(process, "vllm:prompt_tokens_total") == computed
    process.at_rest()


STOPPED = [
    pytest.param(*case.values, marks=[] if case.values in ((2, 1, 1), (1, 2, 0)) else case.marks)
    for case in CASES
]


@pytest.mark.parametrize(("tp", "pp", "rank"), STOPPED, ids=str)
def test_a_stopped_worker_is_replaced(engine, wanted, tp: int, pp: int, rank: int):
    process = start(tp, pp)
    engine.append(process)
    stream = process.stream(PROMPTS[1], max_tokens=200)
    got = list(next(stream)["token_ids"])
    stopped = workers(process)[rank]["pid"]
    os.kill(stopped, signal.SIGSTOP)
    got += [token for event in stream for token in event["token_ids"]]
    assert got == wanted[1]
    assert not Path(f"/proc/{stopped}").exists()
    process.at_rest()


def test_a_worker_that_dies_while_nothing_runs_is_replaced(engine, wanted):
    process = start(1, 2)
    engine.append(process)
    assert tokens(process, PROMPTS[2], 200) == wanted[2]
    os.kill(workers(process)[1]["pid"], signal.SIGKILL)
    give_up = time.monotonic() + 60
    while not workers(process)[1]["restarts"] and time.monotonic() < give_up:
        time.sleep(0.05)
    (first, *_), again = process.generate(PROMPTS[2], max_tokens=200), PROMPTS[2]
    assert first["begin"] == (len(again) - 1) // 16 * 16  # the cached pages are those of before
    assert tokens(process, again, 200) == wanted[2]
    process.at_rest()


def test_all_workers_at_once(engine, wanted):
    process = start(2, 2)
    engine.append(process)
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        answers = [threads.submit(tokens, process, prompt, 200) for prompt in PROMPTS]
        while process.state()["running"] < len(PROMPTS):
            time.sleep(0.01)
        for worker in workers(process):
            os.kill(worker["pid"], signal.SIGKILL)
        assert [answer.result() for answer in answers] == wanted
    process.at_rest()


def test_workers_that_die_again_and_again_end_the_engine(engine):
    """As a model file that has gone would make them: routers then go on elsewhere."""
    process = start(2, 1)
    engine.append(process)
    killed = set()
    give_up = time.monotonic() + 120
    with suppress(httpx.TransportError):  # the end of the engine
        while time.monotonic() < give_up:
            for worker in workers(process):
                if worker["pid"] not in killed:
                    os.kill(worker["pid"], signal.SIGKILL)
                    killed.add(worker["pid"])
            time.sleep(0.05)
    assert process.wait() == 1
    assert len(killed) > 2
    assert "this engine cannot go on" in process.log

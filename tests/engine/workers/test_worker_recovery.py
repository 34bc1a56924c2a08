"""Workers that are killed, stopped or fail: the streams of their engine go on, token by token."""

from __future__ import annotations

import itertools
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

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SPLITS = [(2, 1), (1, 2), (2, 2)]
FIRST = [(2, 2, 0)]
# Each worker of each split in turn; those after the first ones in `make test-thorough`.
CASES = [
    pytest.param(tp, pp, rank, marks=() if (tp, pp, rank) in FIRST else pytest.mark.thorough)
    for tp, pp in SPLITS
    for rank in range(tp * pp)
]
COUNT = 4  # of streams
TOKENS = 100  # of a stream: enough for one that is interrupted to be in its middle
WAIT_S = 120.0  # for the next token: on a busy host new workers take long to import torch
numbers = itertools.count()


def new_prompts() -> list[list[int]]:
    """Return prompts of different lengths that no engine has seen."""
    salt = next(numbers)
    return [
        [(7 * number + i * i + 29 * salt) % 500 for i in range(5 + 61 * number)]
        for number in range(COUNT)
    ]


class Engines:
    """An engine of each split and with each flags, started when a test first needs it."""

    def __init__(self) -> None:
        self._started: dict[tuple[object, ...], EngineProcess] = {}

    def __call__(self, tp: int, pp: int, *flags: str) -> EngineProcess:
        key = (tp, pp, *flags)
        if key not in self._started:
            self._started[key] = start(tp, pp, *flags)
        return self._started[key]

    def kill(self) -> None:
        for process in self._started.values():
            process.kill()


def start(tp: int, pp: int, *flags: str) -> EngineProcess:
    process = EngineProcess(
        "--tp", str(tp), "--pp", str(pp), "--pool-pages", "300", "--max-batch", "8", *flags
    )
    process.http.timeout = WAIT_S
    return process


def workers(process: EngineProcess) -> list[dict]:
    return process.state()["workers"]


def kill(worker: int) -> None:
    """Kill a worker, unless its engine has: it ends all of them as soon as it misses one."""
    with suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)


def tokens(process: EngineProcess, prompt: list[int], count: int) -> list[int]:
    stream = process.generate(prompt, max_tokens=count)
    return [token for event in stream for token in event["token_ids"]]


def metric(process: EngineProcess, name: str) -> float:
    lines = process.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


def restarts(before: list[dict], after: list[dict]) -> list[int]:
    return [new["restarts"] - old["restarts"] for old, new in zip(before, after, strict=True)]


def answers_of(process: EngineProcess, prompts: list[list[int]]) -> list[list[int]]:
    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(lambda prompt: tokens(process, prompt, TOKENS), prompts))


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    started = Engines()
    yield started
    started.kill()


@pytest.mark.parametrize(("tp", "pp", "rank"), CASES, ids=str)
def test_streams_go_on_when_a_worker_is_killed(
    engines, engine_process, tp: int, pp: int, rank: int
):
    """In mid-decode. Nothing is computed again but the steps under way, and nothing is leaked."""
    process, prompts = engines(tp, pp), new_prompts()
    names = (
        "vllm:prompt_tokens_total", "microserve:failed_steps_total",
        "microserve:worker_restarts_total",
    )  # fmt: skip
    counts = [metric(process, name) for name in names]
    before = workers(process)
    with ThreadPoolExecutor(COUNT) as threads:
        answers = [threads.submit(tokens, process, prompt, TOKENS) for prompt in prompts]
        while process.state()["running"] < COUNT:
            time.sleep(0.01)
        os.kill(before[rank]["pid"], signal.SIGKILL)
        got = [answer.result() for answer in answers]
    assert got == answers_of(engine_process, prompts)
    after = workers(process)
    assert after[rank]["pid"] != before[rank]["pid"]
    assert restarts(before, after) == [int(n == rank) for n in range(tp * pp)]
    computed = sum(len(prompt) - 1 for prompt in prompts)  # the last ones count as decodes
    rises = [metric(process, name) - count for name, count in zip(names, counts, strict=True)]
    assert rises == [computed, 0, 1]
    process.at_rest()


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.thorough)]
)
def test_kv_that_is_swapped_outlives_the_worker(engines, engine_process, number: signal.Signals):
    """The worker has memory of its own, which is lost; its tokens came back to the lead's pool."""
    process, prompts = engines(1, 2, "--device-pages", "40"), new_prompts()
    counted = metric(process, "vllm:prompt_tokens_total")
    with ThreadPoolExecutor(COUNT) as threads:
        answers = [threads.submit(tokens, process, prompt, TOKENS) for prompt in prompts]
        while process.state()["running"] < COUNT:
            time.sleep(0.01)
        before = workers(process)
        os.kill(before[1]["pid"], number)
        got = [answer.result() for answer in answers]
    assert got == answers_of(engine_process, prompts)
    after = workers(process)
    assert restarts(before, after) == [0, 1]
    assert after[1]["written_bytes"] > before[1]["written_bytes"]
    computed = sum(len(prompt) - 1 for prompt in prompts)
    assert metric(process, "vllm:prompt_tokens_total") - counted == computed
    process.at_rest()


STOPPED = [
    pytest.param(*case.values, marks=[] if case.values == (2, 1, 1) else pytest.mark.thorough)
    for case in CASES
]


@pytest.mark.parametrize(("tp", "pp", "rank"), STOPPED, ids=str)
def test_a_stopped_worker_is_replaced(engines, engine_process, tp: int, pp: int, rank: int):
    process, prompt = engines(tp, pp), new_prompts()[1]
    stream = process.stream(prompt, max_tokens=TOKENS)
    got = list(next(stream)["token_ids"])
    stopped = workers(process)[rank]["pid"]
    os.kill(stopped, signal.SIGSTOP)
    got += [token for event in stream for token in event["token_ids"]]
    assert got == tokens(engine_process, prompt, TOKENS)
    assert not Path(f"/proc/{stopped}").exists()
    process.at_rest()


def test_a_worker_that_dies_while_nothing_runs_is_replaced(engines, engine_process):
    process, prompt = engines(2, 1), new_prompts()[2]
    wanted = tokens(engine_process, prompt, 30)
    assert tokens(process, prompt, 30) == wanted
    before = workers(process)[1]
    os.kill(before["pid"], signal.SIGKILL)
    give_up = time.monotonic() + 60
    while workers(process)[1]["restarts"] == before["restarts"] and time.monotonic() < give_up:
        time.sleep(0.05)
    first, *_ = process.generate(prompt, max_tokens=30)
    assert first["begin"] == (len(prompt) - 1) // 16 * 16  # the cached pages are those of before
    assert tokens(process, prompt, 30) == wanted
    process.at_rest()


def test_all_workers_at_once(engines, engine_process):
    process, prompts = engines(2, 2), new_prompts()
    with ThreadPoolExecutor(COUNT) as threads:
        answers = [threads.submit(tokens, process, prompt, TOKENS) for prompt in prompts]
        while process.state()["running"] < COUNT:
            time.sleep(0.01)
        for worker in workers(process):
            kill(worker["pid"])
        got = [answer.result() for answer in answers]
    assert got == answers_of(engine_process, prompts)
    process.at_rest()


def test_workers_that_die_again_and_again_end_the_engine(engines):
    """As a model file that has gone would make them: routers then go on elsewhere.

    It ends the engine, so it is the last test.
    """
    dying, killed = engines(2, 1), set()
    give_up = time.monotonic() + 120
    with suppress(httpx.TransportError):  # the end of the engine
        while time.monotonic() < give_up:
            for worker in workers(dying):
                if worker["pid"] not in killed:
                    kill(worker["pid"])
                    killed.add(worker["pid"])
            time.sleep(0.05)
    assert dying.wait() == 1
    assert len(killed) > 2
    assert "this engine cannot go on" in dying.log

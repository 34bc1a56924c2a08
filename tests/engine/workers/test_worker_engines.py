"""Engines of several worker processes: the tokens of one process, and their ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from engine_process import EngineProcess
from forked import ForkedProcess, run_engine
from smollm2_greedy import continuations

from engine.models import load_model, split_model
from engine.protocol import BadRequest
from engine.workers import WorkerGroup, WorkerSettings
from engine.workers.process import threads_of

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SPLITS = [("2", "1"), ("2", "2")]  # two stages alone: with SmolLM2


def flags(split: tuple[str, str]) -> tuple[str, ...]:
    return ("--tp", split[0], "--pp", split[1])


@pytest.fixture(scope="module", params=SPLITS, ids="tp{0[0]} pp{0[1]}".format)
def split_engine(request) -> Iterator[EngineProcess]:
    process = EngineProcess(*flags(request.param), "--pool-pages", "300", "--max-batch", "8")
    yield process
    process.kill()


def workers_of(pid: int) -> list[int]:
    """Return the pids of an engine's workers, behind that of the process they are forked from."""
    with suppress(psutil.NoSuchProcess):
        found = psutil.Process(pid).children(recursive=True)
        return [each.pid for each in found if "engine.workers.part" in each.cmdline()]
    return []


def tokens_of(process: EngineProcess, prompt: list[int], **fields) -> list[int]:
    return [t for event in process.generate(prompt, **fields) for t in event["token_ids"]]


def prompts() -> list[list[int]]:
    return [[(7 * number + i * i) % 500 for i in range(5 + 37 * number)] for number in range(12)]


def test_tokens_are_those_of_one_process(engine_process, split_engine):
    """Many at once, so that they share steps; then again, from cached prefixes."""
    wanted = [tokens_of(engine_process, prompt, max_tokens=24) for prompt in prompts()]
    for _ in range(2):
        with ThreadPoolExecutor(12) as threads:
            got = list(threads.map(lambda p: tokens_of(split_engine, p, max_tokens=24), prompts()))
        assert got == wanted
    split_engine.at_rest()


def test_forks_of_a_prompt_are_those_of_one_process(engine_process, split_engine):
    """Further choices share the prompt's pages, and copy the last one."""

    def choices(process: EngineProcess) -> list[list[int]]:
        with ThreadPoolExecutor(3) as threads:
            first = threads.submit(
                tokens_of, process, prompts()[3], request_id="f0", forks=2, seed=7, temperature=0.9
            )
            more = [
                threads.submit(
                    tokens_of, process, prompts()[3], request_id=f"f{n}", fork_of="f0", choice=n,
                    seed=7, temperature=0.9,
                )
                for n in (1, 2)
            ]  # fmt: skip
            return [each.result() for each in (first, *more)]

    got = choices(split_engine)
    assert got == choices(engine_process)
    split_engine.at_rest()


def test_no_worker_outlives_its_engine(split_engine):
    """The last test of each engine: SIGTERM ends one of them, SIGKILL the other."""
    killed = len(split_engine.state()["workers"]) == 4
    pids = workers_of(split_engine.pid)
    if killed:
        assert len(pids) == 5
        split_engine.signal(signal.SIGKILL)
        gone = time.monotonic() + 30
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < gone:
            time.sleep(0.05)
    else:
        assert len(pids) == 3
        code, _ = split_engine.stop()
        assert code == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tiny", "--tp", "3"], "2 KV heads cannot be split over 3 workers"),
        (["tiny", "--pp", "3"], "2 layers cannot be split over 3 stages"),
        (["mock", "--tp", "2"], "the model mock has no layers"),
        (["tiny", "--tp", "0"], "--tp must be from 1 to 64"),
        (["tiny", "--tp", "2", "--dtype", "float32", "--quantization", "int8"], "bfloat16"),
    ],
)
def test_a_split_that_cannot_be_is_refused_with_a_sentence(arguments: list[str], said: str):
    engine = ForkedProcess(run_engine, *arguments, "--port", "0")
    try:
        assert engine.wait(60) == 2
        assert said in engine.log.splitlines()[-1]
        assert "Traceback" not in engine.log
    finally:
        engine.kill()


def test_a_worker_that_is_killed_while_it_loads_ends_the_start():
    """As by the kernel, when the memory is short."""
    lead = ForkedProcess(run_engine, "tiny", "--tp", "2", "--port", "0")
    try:
        while len(found := workers_of(lead.pid)) < 2:
            assert Path(f"/proc/{lead.pid}").exists(), lead.log
            time.sleep(0.01)
        os.kill(found[1], signal.SIGKILL)
        assert lead.wait(60) == 2
        said = lead.log
        assert "ended while it loaded the model, with signal 9" in said.splitlines()[-1]
        assert "worker 0 (stage 0 of 1, part 0 of 2)" in said or "worker 1" in said
        assert not any(Path(f"/proc/{pid}").exists() for pid in found)
    finally:
        lead.kill()


def test_a_worker_with_other_weights_is_refused():
    """The model's files were replaced after the lead had read them."""
    config = load_model("tiny", dtype=torch.float32, device=torch.device("cpu")).config
    settings = WorkerSettings(
        model="tiny", dtype="float32", device="cpu", quantization="none", tp=2, pp=1,
        decodes=True, threads=1,
        cpus=(0,), page_size=16, device_pages=0, hidden=config.hidden_size, logits_rows=64,
    )  # fmt: skip
    shards = [part.shard for part in split_model(config, tp=2, pp=1)]
    before = workers_of(os.getpid())  # those of other tests' engines
    with pytest.raises(BadRequest, match=r"worker 0 \(.*\) has loaded weights .*, not another"):
        WorkerGroup(settings, shards, vocab=config.vocab_size, digest="another")
    assert workers_of(os.getpid()) == before


@pytest.mark.parametrize(
    "split",
    [
        pytest.param(("2", "1"), marks=pytest.mark.thorough),
        pytest.param(("1", "2"), marks=pytest.mark.thorough),
        ("2", "2"),
    ],
    ids=str,
)
def test_each_worker_has_its_share_of_the_weights(split: tuple[str, str]):
    """And what all of a stage have: norms. Tied embeddings are in the first and the last stage."""
    sizes = []
    for one in (("1", "1"), split):
        process = EngineProcess(*flags(one), "--device-pages", "80")
        try:
            sizes.append([worker["weight_bytes"] for worker in process.state()["workers"]])
        finally:
            process.kill()
    (whole,), each = sizes
    assert max(each) < whole / len(each) * 1.02
    assert whole <= sum(each) < whole + 4096 * len(each)


@pytest.mark.parametrize(
    ("threads", "cpus", "count", "each"),
    [
        (0, [0, 1], 2, [1, 1]),
        (0, [0, 1, 2], 2, [2, 1]),
        (0, [0, 1], 4, [1, 1, 1, 1]),
        (2, [0, 1], 2, [1, 1]),  # as `microserve up` starts an engine on two cores
        (1, [0, 1], 2, [1, 1]),
        (8, list(range(8)), 2, [4, 4]),
    ],
)
def test_workers_divide_the_threads(threads: int, cpus: list[int], count: int, each: list[int]):
    """With two threads on one core, each product waits for the other thread."""
    assert [threads_of(threads, cpus, rank, count) for rank in range(count)] == each


@pytest.mark.thorough
@pytest.mark.parametrize("split", [("3", "1"), ("1", "2")], ids=str)
def test_smollm2_continues_as_in_transformers(split: tuple[str, str]):
    process = EngineProcess(
        *flags(split), "--dtype", "float32", "--pool-pages", "400", model="smollm2"
    )
    try:
        for each in continuations()[:3]:
            got = tokens_of(process, each.prompt, max_tokens=len(each.tokens))
            each.check(got, f"tp {split[0]}, pp {split[1]}")
    finally:
        process.kill()


@pytest.mark.parametrize(
    "split", [("1", "2"), pytest.param(("2", "1"), marks=pytest.mark.thorough)], ids=str
)
def test_swapped_steps_give_the_tokens_of_one_process(engine_process, split: tuple[str, str]):
    """The workers have memory for 80 of the pool's 300 pages; twelve streams have 230 of them."""
    wanted = [tokens_of(engine_process, prompt, max_tokens=24) for prompt in prompts()]
    process = EngineProcess(
        *flags(split), "--pool-pages", "300", "--device-pages", "80", "--max-batch", "12"
    )
    try:
        for _ in range(2):
            with ThreadPoolExecutor(12) as threads:
                got = list(threads.map(lambda p: tokens_of(process, p, max_tokens=24), prompts()))
            assert got == wanted
        process.at_rest()
        workers = process.state()["workers"]
        assert all(0 < one["written_bytes"] < one["fetched_bytes"] for one in workers)
        # The longest context is the half of that memory.
        assert process.http.get("/microserving/model").json()["context_length"] == 40 * 16
    finally:
        process.kill()

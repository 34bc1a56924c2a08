"""KV between engines that are split differently: the tokens are those of one engine."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_process import EngineProcess

SPLITS = [(1, 1), (2, 1), (1, 2), (2, 2)]
PAIRS = list(itertools.permutations(SPLITS, 2))
PROMPT = [(11 * i + i * i) % 500 for i in range(211)]


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[tuple[int, int], EngineProcess]]:
    started: dict[tuple[int, int], EngineProcess] = {}
    for tp, pp in SPLITS:
        split = () if tp * pp == 1 else ("--tp", str(tp), "--pp", str(pp))
        started[tp, pp] = EngineProcess(*split, "--pool-pages", "300", "--max-batch", "8")
    yield started
    for process in started.values():
        process.kill()


def tokens(process: EngineProcess, prompt: list[int], **fields) -> list[int]:
    return [t for event in process.generate(prompt, **fields) for t in event["token_ids"]]


@pytest.fixture(scope="module")
def wanted(engine_process) -> list[int]:
    return tokens(engine_process, PROMPT, max_tokens=60)


@pytest.mark.parametrize("end", [1, 100, 160, len(PROMPT) - 1])
@pytest.mark.parametrize(("sender", "receiver"), PAIRS, ids=str)
def test_kv_of_any_split_continues_on_any_other(
    engines, wanted, request, sender: tuple[int, int], receiver: tuple[int, int], end: int
):
    """Each pair has a prompt of its own, cold on both sides; then the sender has it cached."""
    ours, theirs = engines[sender], engines[receiver]
    for round_ in ("cold", "cached"):
        name = f"{request.node.name}-{round_}"
        lease = theirs.post("prep_recv", request_id=name, prompt=PROMPT, end=end).json()
        begin = lease["match_len"]
        if begin < end:
            sent = ours.post(
                "remote_send", request_id=name, prompt=PROMPT, begin=begin, end=end,
                kv_addr=lease["kv_addr"],
            )  # fmt: skip
            assert sent.json()["sent_tokens"] == end - begin
        got = tokens(
            theirs, PROMPT, max_tokens=60, request_id=name, lease_id=lease["lease_id"], begin=end
        )
        assert got == wanted
    ours.at_rest()
    theirs.at_rest()


def test_a_mirror_of_another_split_continues(engines, wanted):
    """A generation of two stages is mirrored into two tensor parallel workers, and ends there."""
    ours, theirs = engines[1, 2], engines[2, 1]
    lease = theirs.post(
        "prep_recv", request_id="mirror", prompt=PROMPT, end=len(PROMPT), reserve=80
    ).json()
    mirror = {"kv_addr": lease["kv_addr"], "every": 4}
    stream = ours.stream(PROMPT, max_tokens=60, request_id="mirror", mirror=mirror)
    got: list[int] = []
    for event in stream:
        got += event["token_ids"]
        if len(got) > 30:
            break
    stream.close()
    ours.post("release", request_id="mirror")
    rest = tokens(
        theirs, PROMPT, max_tokens=60, request_id="mirror2", output=got,
        lease_id=lease["lease_id"],
    )  # fmt: skip
    assert got + rest == wanted
    ours.at_rest()
    theirs.at_rest()


@pytest.mark.parametrize("rank", range(4))
def test_a_send_goes_on_when_a_worker_of_the_sender_is_killed(engines, rank: int):
    ours, theirs = engines[2, 2], engines[1, 1]
    prompt = [(13 * i + rank) % 500 for i in range(1500)]
    name = f"killed-{rank}"
    lease = theirs.post("prep_recv", request_id=name, prompt=prompt, end=1499).json()
    pids = [w["pid"] for w in ours.state()["workers"]]
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(
            ours.post, "remote_send", request_id=name, prompt=prompt, begin=0, end=1499,
            kv_addr=lease["kv_addr"],
        )  # fmt: skip
        while not theirs.state()["leases"][0]["landed"]:
            assert not sending.done()
        os.kill(pids[rank], signal.SIGKILL)
        assert sending.result().json()["computed_tokens"] == 1499  # none of them twice
    got = tokens(
        theirs, prompt, max_tokens=20, request_id=name, lease_id=lease["lease_id"], begin=1499
    )
    assert got == tokens(ours, prompt, max_tokens=20)
    ours.at_rest()
    theirs.at_rest()

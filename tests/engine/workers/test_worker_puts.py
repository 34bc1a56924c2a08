"""KV between engines that are split differently: the tokens are those of one engine."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_process import EngineProcess

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SPLITS = [(1, 1), (2, 1), (1, 2), (2, 2)]
LENGTH = 211
ENDS = (1, 100, 160, LENGTH - 1)
# Each pair with one end, each engine with three; the others in `make test-thorough`.
CASES = [
    pytest.param(sender, receiver, end, marks=() if far == n else pytest.mark.thorough)
    for (a, sender), (b, receiver) in itertools.permutations(enumerate(SPLITS), 2)
    for n in [(a + b) % len(ENDS)]
    for far, end in enumerate(ENDS)
]
numbers = itertools.count()


def new_prompt(length: int = LENGTH) -> list[int]:
    """Return a prompt that no engine has seen; its first page is already different."""
    number = next(numbers)
    return [(11 * i + i * i + 7 * number) % 500 for i in range(length)]


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[tuple[int, int], EngineProcess]]:
    started: dict[tuple[int, int], EngineProcess] = {}
    for tp, pp in SPLITS:
        split = () if tp * pp == 1 else ("--tp", str(tp), "--pp", str(pp))
        started[tp, pp] = EngineProcess(*split, "--pool-pages", "300", "--max-batch", "8")
        started[tp, pp].http.timeout = 120.0  # on a busy host a new worker takes long to start
    yield started
    for process in started.values():
        process.kill()


def tokens(process: EngineProcess, prompt: list[int], **fields) -> list[int]:
    return [t for event in process.generate(prompt, **fields) for t in event["token_ids"]]


@pytest.mark.parametrize(("sender", "receiver", "end"), CASES, ids=str)
@pytest.mark.parametrize("cached", [False, True], ids=["cold", "cached"])
def test_kv_of_any_split_continues_on_any_other(
    engines, engine_process, sender: tuple[int, int], receiver: tuple[int, int], end: int,
    cached: bool,
):  # fmt: skip
    """The sender computes the prompt, or has its pages; the receiver has never seen it."""
    ours, theirs = engines[sender], engines[receiver]
    prompt, name = new_prompt(), f"{sender}-{receiver}-{end}-{cached}"
    if cached:
        tokens(ours, prompt, max_tokens=1)
    lease = theirs.post("prep_recv", request_id=name, prompt=prompt, end=end).json()
    assert lease["match_len"] == 0
    sent = ours.post(
        "remote_send", request_id=name, prompt=prompt, begin=0, end=end, kv_addr=lease["kv_addr"]
    ).json()
    assert sent["sent_tokens"] == end
    assert sent["cached_tokens"] == (min(end, LENGTH // 16 * 16) if cached else 0)
    got = tokens(
        theirs, prompt, max_tokens=30, request_id=name, lease_id=lease["lease_id"], begin=end
    )
    assert got == tokens(engine_process, prompt, max_tokens=30)
    ours.at_rest()
    theirs.at_rest()


def test_a_mirror_of_another_split_continues(engines, engine_process):
    """A generation of two stages is mirrored into two tensor parallel workers, and ends there."""
    ours, theirs, prompt = engines[1, 2], engines[2, 1], new_prompt()
    lease = theirs.post(
        "prep_recv", request_id="mirror", prompt=prompt, end=len(prompt), reserve=80
    ).json()
    mirror = {"kv_addr": lease["kv_addr"], "every": 4}
    stream = ours.stream(prompt, max_tokens=60, request_id="mirror", mirror=mirror)
    got: list[int] = []
    for event in stream:
        got += event["token_ids"]
        if len(got) > 30:
            break
    stream.close()
    ours.post("release", request_id="mirror")
    rest = tokens(
        theirs, prompt, max_tokens=60, request_id="mirror2", output=got,
        lease_id=lease["lease_id"],
    )  # fmt: skip
    assert got + rest == tokens(engine_process, prompt, max_tokens=60)
    ours.at_rest()
    theirs.at_rest()


@pytest.mark.parametrize(
    "rank", [0, pytest.param(1, marks=pytest.mark.thorough),
             pytest.param(2, marks=pytest.mark.thorough), 3]
)  # fmt: skip
def test_a_send_goes_on_when_a_worker_of_the_sender_is_killed(engines, rank: int):
    ours, theirs = engines[2, 2], engines[1, 1]
    prompt = new_prompt(1500)
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

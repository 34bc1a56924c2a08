"""Death, silence and bad input, on real vLLM engines: nothing wrong, nothing leaked."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import (
    BLOCK,
    EAGER,
    VllmProcess,
    children,
    prompt,
    pytestmark,
    running,
    send,
    tokens,
    unique,
)

__all__ = ["pytestmark"]

LONG = 3000  # tokens; a send of them takes some steps


@pytest.fixture(scope="module")
def pair() -> Iterator[list[VllmProcess]]:
    chunked = (*EAGER, "--max-num-batched-tokens", "256")
    with running(
        VllmProcess(cpu="0", vllm=chunked, pages=300), VllmProcess(cpu="1", pages=300)
    ) as engines:
        yield engines


@pytest.fixture(autouse=True)
def at_rest(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "pair" in request.fixturenames:
        for engine in request.getfixturevalue("pair"):
            engine.at_rest()


def in_background(call: Any, *args: Any, **fields: Any) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call(*args, **fields)))
    thread.start()
    return thread, found


def landed(engine: VllmProcess) -> int:
    engine.post("unpin", prompt=[1])  # the state is as of the latest call or step
    leases = engine.state()["leases"]
    return leases[0]["landed"] if leases else 0


def begin_send(
    sender: VllmProcess, receiver: VllmProcess, ids: list[int], **fields: Any
) -> tuple[str, dict[str, Any], threading.Thread, list[Any]]:
    """Begin a put of all but the last token; return request id, lease, thread, its reply."""
    request_id = unique()
    lease = receiver.post(
        "prep_recv", request_id=request_id, prompt=ids, end=len(ids) - 1, **fields
    ).json()
    thread, found = in_background(
        sender.post,
        "remote_send",
        request_id=request_id,
        prompt=ids,
        begin=lease["match_len"],
        end=len(ids) - 1,
        kv_addr=lease["kv_addr"],
    )
    return request_id, lease, thread, found


def test_a_released_lease_is_never_written_again(pair: list[VllmProcess]):
    """A late put after an abort must not reach the blocks' next owner, nor the prefix cache."""
    sender, receiver = pair
    for round_ in range(4):
        ids = prompt(LONG, 100 + round_)
        _, lease, thread, found = begin_send(sender, receiver, ids)
        time.sleep(0.05 * round_)
        assert receiver.post("release", lease_id=lease["lease_id"]).status_code == 200
        # The blocks' next owners.
        other = prompt(2000, 200 + round_)
        got = receiver.tokens(other)
        thread.join(timeout=60)
        assert found[0].status_code in (200, 410), found[0].text
        again = receiver.tokens(other)
        receiver.at_rest()
        assert got == again == sender.tokens(other)
        assert receiver.tokens(ids) == sender.tokens(ids)


def test_a_send_that_is_released_ends_and_frees_its_blocks(pair: list[VllmProcess]):
    sender, receiver = pair
    for number, delay in enumerate((0.0, 0.01, 0.03)):
        ids = prompt(LONG, 300 + number)
        request_id, lease, thread, found = begin_send(sender, receiver, ids)
        time.sleep(delay)
        assert sender.post("release", request_id=request_id).status_code == 200
        thread.join(timeout=30)
        assert found[0].status_code != 200
        assert receiver.post("release", lease_id=lease["lease_id"]).status_code == 200
        sender.at_rest()


def test_a_lease_that_nobody_claims_expires(pair: list[VllmProcess]):
    receiver = pair[1]
    ids = prompt(100, 400)
    lease = receiver.post("prep_recv", request_id=unique(), prompt=ids, end=99, lease_ms=300).json()
    receiver.at_rest()
    gone = receiver.post("commit", lease_id=lease["lease_id"])
    assert (gone.status_code, gone.json()["error"]["type"]) == (410, "lease_expired")


def test_a_client_that_leaves_ends_its_generation(pair: list[VllmProcess]):
    engine = pair[0]
    events = engine.stream(prompt(100, 500), max_tokens=2000)
    for _ in range(3):
        next(events)
    events.close()
    engine.at_rest()


def test_a_client_that_leaves_while_its_kv_is_awaited(pair: list[VllmProcess]):
    receiver = pair[1]
    ids = prompt(100, 600)
    request_id = unique()
    lease = receiver.post("prep_recv", request_id=request_id, prompt=ids, end=99).json()
    with pytest.raises(Exception, match="timed out"):
        receiver.http.post(
            "/microserving/start_generate",
            json={"request_id": request_id, "prompt": ids, "lease_id": lease["lease_id"],
                  "begin": 99},
            timeout=0.5,
        )  # fmt: skip
    receiver.post("release", request_id=request_id)
    receiver.at_rest()


def test_bad_calls_are_refused_and_write_nothing(pair: list[VllmProcess]):
    sender, receiver = pair
    ids = prompt(64, 700)
    lease = receiver.post("prep_recv", request_id=unique(), prompt=ids, end=64).json()
    address = lease["kv_addr"]
    forged = address[:-4] + ("AAAA" if address[-4:] != "AAAA" else "BBBB")

    def refused(**change: Any) -> tuple[int, str]:
        body = {"request_id": unique(), "prompt": ids, "begin": 0, "end": 64, "kv_addr": address}
        reply = sender.post("remote_send", **{**body, **change})
        return reply.status_code, reply.json()["error"]["type"]

    assert refused(kv_addr=forged) == (401, "bad_address")
    assert refused(prompt=prompt(64, 701)) == (401, "bad_address")
    assert refused(begin=32) == (400, "bad_range")  # the watermark is 0
    assert refused(begin=64) == (400, "bad_range")
    assert refused(end=65) == (400, "bad_range")
    assert refused(prompt=[9999]) == (400, "bad_request")
    assert landed(receiver) == 0
    generating = {"request_id": unique(), "prompt": ids}
    hot = receiver.post("start_generate", **generating, temperature=100.0)
    assert (hot.status_code, hot.json()["error"]["type"]) == (400, "bad_request")
    mirrored = receiver.post("start_generate", **generating, mirror={"kv_addr": address})
    assert (mirrored.status_code, mirrored.json()["error"]["type"]) == (501, "unsupported")
    receiver.post("release", lease_id=lease["lease_id"])
    reserve = receiver.post("prep_recv", request_id=unique(), prompt=ids, end=64, reserve=10)
    assert (reserve.status_code, reserve.json()["error"]["type"]) == (501, "unsupported")
    too_large = receiver.post("prep_recv", request_id=unique(), prompt=prompt(6000, 2), end=6000)
    assert too_large.status_code == 400


def test_leases_take_half_of_the_blocks_at_most(pair: list[VllmProcess]):
    receiver = pair[1]
    leases = []
    for number in range(3):
        ids = prompt(70 * BLOCK, 800 + number)
        reply = receiver.post("prep_recv", request_id=unique(), prompt=ids, end=len(ids))
        if reply.status_code == 429:
            assert "Retry-After" in reply.headers
            break
        leases.append(reply.json()["lease_id"])
    else:
        pytest.fail("three leases of 70 of 300 blocks")
    assert len(leases) == 2
    for lease_id in leases:
        receiver.post("release", lease_id=lease_id)


def test_pins_survive_pressure_and_end(pair: list[VllmProcess]):
    engine = pair[1]
    ids = prompt(4 * BLOCK, 900)
    engine.tokens(ids, max_tokens=1)
    assert engine.post("pin", prompt=ids).json() == {"pinned_tokens": 4 * BLOCK}
    for number in range(6):
        engine.tokens(prompt(80 * BLOCK, 910 + number), max_tokens=1)  # more than the pool
    got = engine.generate([*ids, 1], max_tokens=1)
    assert got[-1]["usage"]["cached_tokens"] == 4 * BLOCK
    assert engine.post("unpin", prompt=ids).json() == {"unpinned_tokens": 4 * BLOCK}
    assert engine.post("unpin", prompt=ids).json() == {"unpinned_tokens": 0}


def test_an_idle_engine_does_not_spin(pair: list[VllmProcess]):
    for engine in pair:
        engine.at_rest()
    lease = pair[1].post("prep_recv", request_id=unique(), prompt=prompt(90, 950), end=89).json()
    processes = [pid for engine in pair for pid in (engine.process.pid, engine.core)]
    time.sleep(1)
    before = sum(map(cpu_s, processes))
    time.sleep(4)
    assert sum(map(cpu_s, processes)) - before < 4 * 0.15 * len(pair)
    pair[1].post("release", lease_id=lease["lease_id"])


def lives(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_stopped_sender_holds_no_blocks_for_ever(pair: list[VllmProcess]):
    """SIGSTOP of the sender's engine core in mid-put: the receiver goes on without it."""
    sender, receiver = pair
    for delay in (0.02, 0.1, 0.2):
        ids = prompt(LONG, 1000 + int(delay * 1000))
        request_id, lease, thread, _found = begin_send(sender, receiver, ids)
        time.sleep(delay)
        os.kill(sender.core, signal.SIGSTOP)
        try:
            time.sleep(0.2)
            got = receiver.generate(ids, lease_id=lease["lease_id"], request_id=request_id)
        finally:
            os.kill(sender.core, signal.SIGCONT)
        thread.join(timeout=60)
        assert tokens(got) == sender.tokens(ids) == receiver.tokens(ids)
        receiver.at_rest()


def test_a_cached_send_that_is_released_frees_its_blocks_though_nothing_follows(
    pair: list[VllmProcess],
):
    """The last copy may end after the call has, and nothing else happens on the engine then."""
    sender, receiver = pair
    ids = prompt(LONG, 1100)
    sender.tokens(ids)  # all that is sent is cached then
    for _ in range(20):
        request_id, lease, thread, _found = begin_send(sender, receiver, ids)
        time.sleep(random.uniform(0, 0.01))
        assert sender.post("release", request_id=request_id).status_code == 200
        thread.join(timeout=30)
        assert receiver.post("release", lease_id=lease["lease_id"]).status_code == 200
        sender.at_rest(10)


KILLED = {("sender", 0.0), ("receiver", 0.1), ("sender", 0.25)}  # each starts two or three engines


@pytest.mark.parametrize(
    ("victim", "delay"),
    [
        pytest.param(*case, marks=() if case in KILLED else pytest.mark.thorough)
        for case in itertools.product(("sender", "receiver"), (0.0, 0.1, 0.25))
    ],
)
def test_sigkill_in_mid_put(victim: str, delay: float):
    with running(
        VllmProcess(cpu="0", vllm=(*EAGER, "--max-num-batched-tokens", "256"), pages=300),
        VllmProcess(cpu="1", pages=300),
    ) as (sender, receiver):
        ids = prompt(LONG, 77)
        request_id, lease, thread, _ = begin_send(sender, receiver, ids)
        time.sleep(delay)
        dead, left = (sender, receiver) if victim == "sender" else (receiver, sender)
        core = dead.core
        os.kill(dead.process.pid, signal.SIGKILL)  # the lead alone
        dead.process.wait()
        thread.join(timeout=60)
        give_up = time.monotonic() + 30
        while lives(core) and time.monotonic() < give_up:
            time.sleep(0.05)
        assert not lives(core), "the engine core has outlived its lead"
        if victim == "sender":
            got = receiver.generate(ids, lease_id=lease["lease_id"], request_id=request_id)
            assert tokens(got) == receiver.tokens(ids)
        left.at_rest()
        if victim == "receiver":
            port = int(dead.url.rsplit(":", 1)[1])
            with running(VllmProcess(cpu="1", port=port, pages=300)) as (again,):
                stale = sender.post(
                    "remote_send",
                    request_id=unique(),
                    prompt=ids,
                    begin=lease["match_len"],
                    end=len(ids) - 1,
                    kv_addr=lease["kv_addr"],
                )
                assert stale.status_code in (409, 502), stale.text
                request_id, lease_id, _ = send(sender, again, ids, LONG - 1)
                got = again.generate(ids, begin=LONG - 1, lease_id=lease_id, request_id=request_id)
                assert tokens(got) == sender.tokens(ids)
                again.at_rest()


def test_an_engine_ends_with_its_engine_core(pair: list[VllmProcess]):
    with running(VllmProcess(cpu="1")) as (engine,):
        thread, found = in_background(engine.generate, prompt(50, 1), max_tokens=4000)
        time.sleep(0.5)
        os.kill(engine.core, signal.SIGKILL)
        thread.join(timeout=20)
        assert not thread.is_alive()
        assert "error" in found[0][-1]
        assert engine.process.wait(timeout=20) == 2
        assert "vLLM's engine core has ended, and this engine with it" in engine.log


def test_sigterm_ends_both_processes(pair: list[VllmProcess]):
    with running(VllmProcess(cpu="1")) as (engine,):
        below = children(engine.process.pid)
        assert engine.stop() == 0, engine.log
        gone = time.monotonic() + 30  # they end with the lead, or the kernel ends them after it
        while any(map(lives, below)) and time.monotonic() < gone:
            time.sleep(0.05)
        assert not any(map(lives, below))
        assert "leaked" not in engine.log
        assert "Traceback" not in engine.log

"""A debtor bounds and checks what creditors answer, and drains the others when one fails."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from creditors import EPOCH, borrow, decode_span, remote, small_limits
from fake_creditor import FakeCreditor, Reply

from kvcache.errors import BadRequest, LeaseExpired, PeerUnreachable, Timeout
from kvcache.memory import KVLayout
from kvcache.remote_attention import AttentionShape, CreditorFailed, RemoteAttention
from kvcache.remote_attention.debtor.entry import descriptor
from kvcache.remote_attention.exchange import (
    Buffers,
    Kind,
    Refusal,
    pack_ranges,
)
from kvcache.remote_attention.exchange.buffers import SEALS
from kvcache.types import EngineId, LeaseId, TokenPos

LAYOUT = KVLayout(2, 33, 16, 2, 32, torch.float32)
HEADS = 4
SHAPE = AttentionShape.of(LAYOUT, HEADS)
SPAN = decode_span(0, 200, borrow("loan", range(1, 9), range(8)))
RANGES = pack_ranges([[(TokenPos(0), TokenPos(128))]])
PART = np.ones(SHAPE.part_floats, np.float32).tobytes()
Q = torch.zeros(1, HEADS, 32)


def refused(loan: str = "loan") -> bytes:
    return Refusal(LeaseExpired("gone"), (LeaseId(loan),)).pack()


def part(**changes: float) -> bytes:
    """Return an answer of one row, in which one number is another."""
    values, top, total = (np.ones(n, np.float32) for n in (HEADS * 32, HEADS, HEADS))
    for name, value in changes.items():
        {"values": values, "top": top, "total": total}[name][-1] = value
    return b"".join(each.tobytes() for each in (values, top, total))


PLANNED = (Kind.PLANNED, {}, RANGES)
ANSWER = (Kind.ANSWER, {}, PART)


@pytest.fixture
def world() -> Iterator[Callable[..., RemoteAttention]]:
    made: list[FakeCreditor] = []
    debtor = remote(LAYOUT, HEADS, timeout_s=0.3)

    def connect(dribble_s: float = 0.0, **replies: list[Reply]) -> RemoteAttention:
        for name, some in replies.items():
            made.append(FakeCreditor(name, SHAPE, some, dribble_s))
            debtor.connect(made[-1].name, [made[-1].endpoint], EPOCH)
        debtor.begin_step({each.name: [SPAN] for each in made})
        return debtor

    yield connect
    debtor.close()
    for each in made:
        each.close()


def test_an_answer_is_read_in_its_place(world: Callable[..., RemoteAttention]):
    debtor = world(one=[PLANNED, ANSWER])
    debtor.send(0, Q)
    ((part,),) = debtor.receive(0)[EngineId("one")].parts()
    assert part[:2] == (0, 128)
    assert (part.attention.values == 1).all()
    assert (part.attention.total == 1).all()


@pytest.mark.parametrize(
    "replies",
    [
        [(Kind.PLANNED, {"size": 1 << 30}, b"")],
        [(Kind.PLANNED, {}, RANGES[:-4])],
        [(Kind.PLANNED, {}, pack_ranges([[]]))],
        [(Kind.PLANNED, {}, pack_ranges([[(TokenPos(0), TokenPos(64))]]))],
        [(Kind.PLANNED, {}, pack_ranges([[(TokenPos(128), TokenPos(256))]]))],
        [(Kind.PLANNED, {}, pack_ranges([[(TokenPos(0), TokenPos(128))] * 2]))],
        [(Kind.PLANNED, {}, pack_ranges([[(TokenPos(128), TokenPos(0))]]))],
        [(Kind.PLANNED, {"step": 9}, RANGES)],
        [(Kind.ANSWER, {}, PART)],
        [(Kind.REFUSED, {"size": 1 << 30}, b"")],
        [(Kind.REFUSED, {}, b"no JSON")],
        [PLANNED, (Kind.ANSWER, {}, PART[:-4])],
        [PLANNED, (Kind.ANSWER, {"size": 1 << 30}, PART)],
        [PLANNED, (Kind.ANSWER, {"layer": 1}, PART)],
        [PLANNED, (Kind.PLANNED, {}, RANGES)],
        [PLANNED, (Kind.QUERY, {}, b"")],
        [(Kind.PLANNED, {}, pack_ranges([[(TokenPos(0), TokenPos(144))]]))],
        [(Kind.PLANNED, {}, pack_ranges([[(TokenPos(0), TokenPos((1 << 31) - 1))]]))],
        [(Kind.PLANNED, {}, pack_ranges([[(TokenPos(-16), TokenPos(128))]]))],
        [(Kind.REFUSED, {}, b"[" * 60_000)],
        [(Kind.REFUSED, {}, b'{"type": [], "message": 0, "loans": 7}')],
        [PLANNED, (Kind.ANSWER, {}, part(values=np.nan))],
        [PLANNED, (Kind.ANSWER, {}, part(values=np.inf))],
        [PLANNED, (Kind.ANSWER, {}, part(top=np.nan))],
        [PLANNED, (Kind.ANSWER, {}, part(top=-np.inf))],
        [PLANNED, (Kind.ANSWER, {}, part(total=np.nan))],
        [PLANNED, (Kind.ANSWER, {}, part(total=np.inf))],
        [PLANNED, (Kind.ANSWER, {}, part(total=0.0))],
        [PLANNED, (Kind.ANSWER, {}, part(total=-1.0))],
    ],
)
def test_a_creditor_that_breaks_the_protocol_is_lost(
    world: Callable[..., RemoteAttention], replies: list[Reply]
):
    debtor = world(one=replies)
    debtor.send(0, Q)
    with pytest.raises(CreditorFailed) as caught:
        debtor.receive(0)
    assert (caught.value.lost, caught.value.loans) == (True, ("loan",))
    assert isinstance(caught.value.reason, BadRequest)
    assert debtor.connected() == []


def test_silence_is_a_timeout(world: Callable[..., RemoteAttention]):
    debtor = world(one=[PLANNED])
    debtor.send(0, Q)
    began = time.monotonic()
    with pytest.raises(CreditorFailed) as caught:
        debtor.receive(0)
    assert time.monotonic() - began < 10
    assert isinstance(caught.value.reason, Timeout)


@pytest.mark.parametrize("first", [PLANNED, (Kind.PLANNED, {}, RANGES * 200)])
def test_an_answer_that_comes_byte_by_byte_is_a_timeout(
    world: Callable[..., RemoteAttention], first: Reply
):
    """Each byte comes in time, but the time is for all of them."""
    debtor = world(one=[first, ANSWER], dribble_s=0.01)
    debtor.send(0, Q)
    began = time.monotonic()
    with pytest.raises(CreditorFailed) as caught:
        debtor.receive(0)
    assert time.monotonic() - began < 3
    assert isinstance(caught.value.reason, Timeout if first is PLANNED else (Timeout, BadRequest))
    assert debtor.connected() == []


def test_large_numbers_are_attention(world: Callable[..., RemoteAttention]):
    """Also if they have no sum."""
    large = np.full(SHAPE.part_floats, 3e38, np.float32).tobytes()
    debtor = world(one=[PLANNED, (Kind.ANSWER, {}, large)])
    debtor.send(0, Q)
    assert set(debtor.receive(0)) == {"one"}


def test_queries_that_are_no_numbers_are_not_the_creditors_fault(
    world: Callable[..., RemoteAttention],
):
    debtor = world(one=[PLANNED, (Kind.ANSWER, {}, part(values=np.nan))])
    debtor.send(0, torch.full_like(Q, torch.nan))
    assert set(debtor.receive(0)) == {"one"}
    assert debtor.connected() == ["one"]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("lie", ["unsealed", "unwritable", "short", "no memory", "none"])
def test_buffers_that_are_none(lie: str):
    """Refused with an error; the descriptor that came is closed, once."""
    size = Buffers.create(SHAPE, small_limits())
    bytes_of_all = os.fstat(size.fd).st_size
    size.close()
    before = descriptors()
    if lie == "none":
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.send(b"\0")
            with pytest.raises(PeerUnreachable, match="no memory"):
                descriptor(ours)
    elif lie == "no memory":
        with pytest.raises(PeerUnreachable):
            Buffers.attach(SHAPE, small_limits(), os.open("/dev/null", os.O_RDWR))
    else:
        fd = os.memfd_create("lie", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, bytes_of_all - (4096 if lie == "short" else 0))
        if lie != "unsealed":
            write = fcntl.F_SEAL_WRITE if lie == "unwritable" else 0
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | write)
        with pytest.raises(PeerUnreachable):
            Buffers.attach(SHAPE, small_limits(), fd)
    assert descriptors() == before


def test_the_others_are_drained_when_one_refuses(world: Callable[..., RemoteAttention]):
    """Their next step finds no old answer. All that failed are named."""
    refusal = (Kind.REFUSED, {}, refused())
    debtor = world(
        one=[PLANNED, ANSWER, PLANNED, ANSWER],
        two=[PLANNED, refusal, PLANNED, ANSWER],
        three=[PLANNED, refusal, PLANNED, ANSWER],
    )
    debtor.send(0, Q)
    with pytest.raises(CreditorFailed) as caught:
        debtor.receive(0)
    assert (caught.value.creditor, caught.value.lost) == ("two", False)
    assert caught.value.loans == ("loan",)
    assert [each.creditor for each in caught.value.also] == ["three"]
    debtor.begin_step({name: [SPAN] for name in debtor.connected()})
    debtor.send(1, Q)
    assert set(debtor.receive(1)) == {"one", "two", "three"}


def test_a_refused_plan_is_one_failure(world: Callable[..., RemoteAttention]):
    """The queries that were sent before the refusal was read are refused too."""
    debtor = world(
        one=[(Kind.REFUSED, {}, refused("a")), (Kind.REFUSED, {}, refused("b")), PLANNED, ANSWER]
    )
    debtor.send(0, Q)
    with pytest.raises(CreditorFailed) as caught:
        debtor.receive(0)
    assert caught.value.loans == ("a",)
    debtor.begin_step({EngineId("one"): [SPAN]})
    debtor.send(0, Q)
    assert set(debtor.receive(0)) == {"one"}


def test_a_creditor_that_is_disconnected_during_a_wait(
    world: Callable[..., RemoteAttention],
):
    """By another thread, as when its last loan ends."""
    debtor = world(one=[PLANNED])
    debtor.send(0, Q)
    other = threading.Timer(0.05, debtor.disconnect, [EngineId("one")])
    other.start()
    with pytest.raises(CreditorFailed) as caught:
        debtor.receive(0)
    assert isinstance(caught.value.reason, PeerUnreachable)
    other.join()
    with pytest.raises(PeerUnreachable):
        debtor.estimate(EngineId("one"))


def test_more_rows_than_the_creditor_takes_are_not_sent(
    world: Callable[..., RemoteAttention],
):
    debtor = world(one=[PLANNED, PLANNED, ANSWER])
    long = decode_span(0, 200, *SPAN.borrowed)
    with pytest.raises(CreditorFailed, match="65 rows in a step") as caught:
        debtor.begin_step({EngineId("one"): [long] * 65})
    assert not caught.value.lost
    debtor.begin_step({EngineId("one"): [SPAN]})
    debtor.send(0, Q)
    assert set(debtor.receive(0)) == {"one"}


def test_a_step_without_spans_or_layers_is_refused(world: Callable[..., RemoteAttention]):
    debtor = world(one=[PLANNED, PLANNED, ANSWER])
    with pytest.raises(BadRequest, match="no spans"):
        debtor.begin_step({EngineId("one"): []})
    debtor.begin_step({EngineId("one"): [SPAN]})
    with pytest.raises(BadRequest, match="do not fit"):
        debtor.send(0, torch.zeros(1, HEADS, 16))

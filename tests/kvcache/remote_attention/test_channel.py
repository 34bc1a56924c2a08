"""A debtor bounds and checks what creditors answer, and drains the others when one fails."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest
import torch
from creditors import EPOCH, borrow, decode_span, identity, remote, small_limits

from kvcache.errors import BadRequest, LeaseExpired, PeerUnreachable, Timeout
from kvcache.memory import KVLayout
from kvcache.remote_attention import AttentionShape, CreditorFailed, RemoteAttention
from kvcache.remote_attention.creditor.admission import admit
from kvcache.remote_attention.creditor.debtor_connection import DebtorConnection
from kvcache.remote_attention.exchange import (
    HEAD,
    Head,
    Kind,
    Refusal,
    listen_tcp,
    pack_ranges,
)
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


class FakeCreditor:
    """Answers each request with the next of its replies: a kind, changes of the head, a body."""

    def __init__(self, name: str, replies: list[tuple[Kind, dict[str, int], bytes]]) -> None:
        self.name = EngineId(name)
        self.replies = replies
        self._listener, self.endpoint = listen_tcp("127.0.0.1")
        self._done = threading.Event()
        self._connection: DebtorConnection
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        accepted, _ = self._listener.accept()
        self._connection = admit(accepted, identity(self.name), SHAPE, small_limits())
        connection = self._connection.socket
        connection.settimeout(20)
        with suppress(EOFError):
            self._answer(connection)
        self._done.wait(20)

    def _answer(self, connection: socket.socket) -> None:
        while self.replies:
            head = Head.unpack(self._read(HEAD.size))
            self._read(head.size)
            kind, changes, body = self.replies.pop(0)
            reply = Head(kind, head.step, head.layer, len(body))._replace(**changes)
            connection.sendall(reply.pack() + body)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += (part := self._connection.socket.recv(size - len(data)))
            if not part:
                raise EOFError("the debtor has disconnected")
        return data

    def close(self) -> None:
        self._done.set()
        self._thread.join(20)
        self._connection.close()
        self._listener.close()


PLANNED = (Kind.PLANNED, {}, RANGES)
ANSWER = (Kind.ANSWER, {}, PART)


@pytest.fixture
def world() -> Iterator[Callable[..., RemoteAttention]]:
    made: list[FakeCreditor] = []
    debtor = remote(LAYOUT, HEADS, timeout_s=0.3)

    def connect(**replies: list[tuple[Kind, dict[str, int], bytes]]) -> RemoteAttention:
        for name, some in replies.items():
            made.append(FakeCreditor(name, some))
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
    ],
)
def test_a_creditor_that_breaks_the_protocol_is_lost(
    world: Callable[..., RemoteAttention], replies: list[tuple[Kind, dict[str, int], bytes]]
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

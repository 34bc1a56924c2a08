"""Whatever a debtor or a stranger sends to a creditor, an honest debtor is answered."""

from __future__ import annotations

import gc
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from creditors import (
    DEBTOR,
    EPOCH,
    SECRET,
    LendingEngine,
    borrow,
    decode_span,
    endpoint,
    read_until_closed,
    remote,
    small_limits,
)
from raw_debtor import Raw

from kvcache.attention import BLOCK
from kvcache.errors import BadRequest, PeerUnreachable
from kvcache.memory import KVLayout
from kvcache.remote_attention import AttentionShape, RemoteSpan
from kvcache.remote_attention.creditor import creditor as creditor_module
from kvcache.remote_attention.creditor import reception
from kvcache.remote_attention.exchange import HEAD, PURPOSE, Head, Kind, StepPlan
from kvcache.transport import handshake
from kvcache.types import EngineId, LeaseId, PageId, TokenPos

PAGE, HEADS = 16, 4
LAYOUT = KVLayout(2, 33, PAGE, 2, 32, torch.float32)
SHAPE = AttentionShape.of(LAYOUT, HEADS)
NAME = EngineId("creditor")
PER_BLOCK = BLOCK // PAGE


@pytest.fixture
def lending() -> Iterator[Callable[..., LendingEngine]]:
    made: list[LendingEngine] = []

    def make(**options: Any) -> LendingEngine:
        options.setdefault("limits", small_limits())
        made.append(LendingEngine(NAME, LAYOUT, HEADS, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(creditor_module, "MESSAGE_S", 0.2)
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.3)


@contextmanager
def honest(engine: LendingEngine, kind: str = "unix") -> Iterator[Callable[[], torch.Tensor]]:
    """Return a debtor's decode over a loan of its own."""
    pages = lent(engine, DEBTOR.engine_id, DEBTOR.epoch)
    span = decode_span(0, 200, borrow("loan", pages, range(PER_BLOCK)))
    debtor = remote(LAYOUT, HEADS)
    debtor.connect(NAME, endpoint(engine.creditor.endpoints, kind), EPOCH)

    def decode() -> torch.Tensor:
        debtor.begin_step({NAME: [span]})
        debtor.send(1, torch.ones(1, HEADS, 32))
        ((part,),) = debtor.receive(1)[NAME].parts()
        found = part.attention.output()
        torch.testing.assert_close(found, torch.full_like(found, 0.5))
        return found

    yield decode
    decode()
    debtor.close()


def lent(engine: LendingEngine, debtor: str, epoch: int = EPOCH) -> list[PageId]:
    pages = engine.lend("loan", PER_BLOCK, debtor=debtor, epoch=epoch)
    engine.pool[:, pages] = 0.5
    return pages


def address(engine: LendingEngine) -> tuple[str, int]:
    host, _, port = endpoint(engine.creditor.endpoints, "tcp")[0][4:].rpartition(":")
    return host, int(port)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def resources() -> tuple[int, int]:
    """Return the descriptors and threads of this process, once its handshakes have ended."""
    until(lambda: all(thread.name != "creditor-admit" for thread in threading.enumerate()))
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


# Strangers


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def proven(**changes: object) -> bytes:
    fields = {"challenge": "c", "body": "{}", "proof": "0" * 64}
    return frame(json.dumps({**fields, **changes}).encode())


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack(">I", 1 << 31),
        frame(b"[" * 500_000),
        pytest.param(frame(b'{"proof": ' * 100_000), marks=pytest.mark.thorough),
        frame(b"\xff\xfe"),
        pytest.param(frame(b"1" * 10_000), marks=pytest.mark.thorough),
        proven(proof="é" * 64),
        pytest.param(proven(proof=7), marks=pytest.mark.thorough),
        proven(body="\ud800"),
        pytest.param(proven(challenge="\ud800x"), marks=pytest.mark.thorough),
        pytest.param(proven(challenge=[]), marks=pytest.mark.thorough),
        b"",
    ],
)
def test_a_stranger_leaves_nothing(lending: Callable[..., LendingEngine], sent: bytes):
    engine = lending()
    with honest(engine) as decode:
        before = resources()
        with socket.create_connection(address(engine)) as stranger:
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            read_until_closed(stranger)
        until(lambda: resources() == before)
        decode()


@pytest.mark.parametrize("said", ["[" * 100_000, "[]", '{"engine_id": 3, "epoch": 1}', "\ud800"])
def test_a_debtor_that_says_nonsense_of_itself(lending: Callable[..., LendingEngine], said: str):
    engine = lending()
    before = resources()
    with socket.create_connection(address(engine)) as connection, pytest.raises(PeerUnreachable):
        handshake.send_handshake(connection, SECRET, EPOCH, said, purpose=PURPOSE)
    until(lambda: resources() == before)


def test_a_handshake_that_comes_byte_by_byte_ends(
    lending: Callable[..., LendingEngine], impatient: None
):
    """Each byte comes in time, but the time is for all of them."""
    engine = lending()
    before = resources()
    with socket.create_connection(address(engine)) as stranger:
        began = time.monotonic()
        with pytest.raises(OSError, match=r"reset|[Bb]roken"):
            for byte in frame(bytes(1 << 16)):
                stranger.sendall(bytes([byte]))
                time.sleep(0.02)
                assert time.monotonic() - began < 10
    until(lambda: resources() == before)


def test_strangers_do_not_keep_a_debtor_out(
    lending: Callable[..., LendingEngine], monkeypatch: pytest.MonkeyPatch
):
    """They may hold as many connections as they like; the oldest handshakes end."""
    monkeypatch.setattr(reception, "HANDSHAKES", 8)
    engine = lending()
    before = resources()
    strangers = [socket.create_connection(address(engine)) for _ in range(40)]
    with honest(engine, "tcp"):
        # A handshake that is ended takes a moment to end.
        until(lambda: threading.active_count() <= before[1] + 9)
    for each in strangers:
        each.close()
    until(lambda: resources() == before)


# Debtors that have the secret


def test_a_debtor_that_stops_within_a_message_is_disconnected(
    lending: Callable[..., LendingEngine], impatient: None
):
    engine = lending()
    with honest(engine) as decode:
        before = resources()
        for sent in (
            Head(Kind.PLAN, 1).pack()[:9],
            Head(Kind.PLAN, 1, size=1 << 10).pack() + bytes(100),
            Head(Kind.QUERY, 1, size=1 << 10).pack() + bytes(100),
            b"noise" * 100,
        ):
            with Raw(engine, SHAPE) as raw:
                raw.socket.sendall(sent)
                decode()
                read_until_closed(raw.socket)
            until(lambda: engine.creditor.statistics().debtors == 1)
        until(lambda: resources() == before)


def test_a_debtor_that_does_not_read_is_disconnected(
    lending: Callable[..., LendingEngine], impatient: None
):
    """It asks for answers, and never reads one."""
    engine = lending(limits=small_limits(rows=512, reply_bytes=1 << 22))
    pages = lent(engine, "raw")
    span = RemoteSpan(0, TokenPos(300), 512, (borrow("loan", pages, range(PER_BLOCK)),))
    with honest(engine) as decode, Raw(engine, SHAPE) as raw:
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.send(Kind.PLAN, body=StepPlan.pack(SHAPE, [span]))
        with pytest.raises(OSError, match=r"reset|[Bb]roken|timed out"):  # it takes no more
            for _ in range(200):
                raw.send(Kind.QUERY, body=bytes(512 * SHAPE.query_bytes))
        decode()
        until(lambda: engine.creditor.statistics().debtors == 1)


def test_idle_connections_make_room(
    lending: Callable[..., LendingEngine], monkeypatch: pytest.MonkeyPatch
):
    """One peer may connect under many names."""
    monkeypatch.setattr(creditor_module, "CONNECTIONS", 4)
    engine = lending()
    many = [Raw(engine, SHAPE, name=f"raw-{number}") for number in range(4)]
    until(lambda: engine.creditor.statistics().debtors == 4)
    with Raw(engine, SHAPE, name="late") as late:  # nobody has been idle for long
        assert read_until_closed(late.socket) == b""
    monkeypatch.setattr(creditor_module, "IDLE_S", 0.0)
    with honest(engine):
        (ended,), _, _ = select.select([each.socket for each in many], [], [], 20)
        assert read_until_closed(ended) == b""
        # It ends before the new one is counted.
        until(lambda: engine.creditor.statistics().debtors == 4)
    for each in many:
        each.socket.close()
        each.buffers.close()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_queries_that_are_no_numbers_harm_their_own_answer_only(
    lending: Callable[..., LendingEngine], value: float, kind: str
):
    engine = lending()
    pages = lent(engine, "raw")
    plan = StepPlan.pack(SHAPE, [decode_span(0, 200, borrow("loan", pages, range(PER_BLOCK)))])
    with honest(engine) as decode, Raw(engine, SHAPE, kind) as raw:
        raw.send(Kind.PLAN, body=plan)
        assert raw.reply()[0].kind is Kind.PLANNED
        body = np.full(SHAPE.query_bytes // 4, value, np.float32).tobytes()
        if kind == "unix":
            raw.buffers.queries(1).fill_(value)
        raw.send(Kind.QUERY, body=body if kind == "tcp" else b"")
        assert raw.reply()[0].kind is Kind.ANSWER
        decode()
    assert (engine.pool[:, pages] == 0.5).all()


def test_a_page_so_far_away_that_its_position_wraps(lending: Callable[..., LendingEngine]):
    """2^28 pages of 16 tokens are 2^32 positions, 0 in 32 bits."""
    engine = lending()
    pages = lent(engine, "raw")
    with honest(engine), Raw(engine, SHAPE) as raw:
        for number in (1 << 28, (1 << 31) - 1, 13):
            span = decode_span(0, 200, borrow("loan", pages[:2], [0, number]))
            raw.send(Kind.PLAN, body=StepPlan.pack(SHAPE, [span]))
            refusal = raw.refusal()
            assert isinstance(refusal.error, BadRequest)
            assert "no keys before" in refusal.error.message


def test_a_replayed_message_is_answered_as_such_and_no_other(
    lending: Callable[..., LendingEngine],
):
    """A step that was planned again has other rows; queries of an earlier one are refused.

    A recorded conversation opens no connection, since each handshake has challenges of its own.
    """
    engine = lending()
    pages = lent(engine, "raw")
    span = decode_span(0, 200, borrow("loan", pages, range(PER_BLOCK)))
    plan = StepPlan.pack(SHAPE, [span])
    query = bytes(SHAPE.query_bytes)
    with honest(engine) as decode, Raw(engine, SHAPE) as raw:
        for _ in range(3):
            raw.send(Kind.PLAN, 1, body=plan)
            assert raw.reply()[0].kind is Kind.PLANNED
        for _ in range(3):
            raw.send(Kind.QUERY, 1, 0, query)
            assert raw.reply()[0][:3] == (Kind.ANSWER, 1, 0)
        raw.send(Kind.PLAN, 2, body=plan)
        raw.reply()
        raw.send(Kind.QUERY, 1, 0, query)
        assert "was not planned" in raw.refusal().error.message
        engine.free("loan", debtor="raw", epoch=EPOCH)
        raw.send(Kind.QUERY, 2, 0, query)
        assert raw.refusal().loans == (LeaseId("loan"),)
        decode()


def test_an_earlier_process_of_a_debtor_has_none_of_its_loans(
    lending: Callable[..., LendingEngine],
):
    engine = lending()
    pages = lent(engine, "raw", EPOCH + 1)
    plan = StepPlan.pack(SHAPE, [decode_span(0, 200, borrow("loan", pages, range(PER_BLOCK)))])
    with honest(engine), Raw(engine, SHAPE) as raw:
        raw.send(Kind.PLAN, body=plan)
        assert raw.refusal().loans == (LeaseId("loan"),)


@pytest.mark.slow
def test_noise_of_every_kind(lending: Callable[..., LendingEngine]):
    """Random heads and bodies, each on a connection of its own or behind good messages."""
    engine = lending(limits=small_limits(rows=8, pages=64, spans=4))
    pages = lent(engine, "raw")
    plan = StepPlan.pack(SHAPE, [decode_span(0, 200, borrow("loan", pages, range(PER_BLOCK)))])
    generator = np.random.default_rng(0)
    with honest(engine) as decode:
        before = resources()
        for number in range(60):
            with Raw(engine, SHAPE, ("tcp", "unix")[number % 2]) as raw:
                if number % 3:
                    raw.send(Kind.PLAN, body=plan)
                    assert raw.reply()[0].kind is Kind.PLANNED
                body = bytearray(plan)
                for _ in range(int(generator.integers(1, 6))):
                    body[int(generator.integers(len(body)))] = int(generator.integers(256))
                sent = [
                    generator.bytes(HEAD.size + int(generator.integers(64))),
                    Head(Kind.PLAN, 5, size=len(body)).pack() + body,
                    Head(Kind.QUERY, 1, int(generator.integers(9)), 64).pack() + bytes(64),
                ][number % 3]
                raw.socket.sendall(sent)
                raw.socket.shutdown(socket.SHUT_WR)
                read_until_closed(raw.socket)
            decode()
        del raw  # with the mapping of its buffers
        until(lambda: resources() == before)

"""What a creditor answers, and what it refuses without harm to others."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    identity,
    read_until_closed,
    remote,
    small_limits,
)
from raw_debtor import Raw

from kvcache.attention import BLOCK, HeldSpan, held_planner_for
from kvcache.errors import (
    BadRequest,
    Forbidden,
    LeaseExpired,
    NoCapacity,
    PeerUnreachable,
    StaleEpoch,
    TooLarge,
    Unsupported,
)
from kvcache.lease import Identity
from kvcache.memory import KVLayout
from kvcache.remote_attention import (
    AttentionShape,
    CreditorFailed,
    Debtor,
    PagesOfLoans,
    RemoteAttention,
    RemoteSpan,
)
from kvcache.remote_attention.debtor.entry import enter
from kvcache.remote_attention.exchange import Buffers, Kind, StepPlan
from kvcache.shard import Shard
from kvcache.transport import handshake
from kvcache.types import EngineId, LeaseId, PageId, TokenPos

PAGE, HEADS, KV_HEADS, DIM, LAYERS = 16, 4, 2, 32, 2
PER_BLOCK = BLOCK // PAGE
LAYOUT = KVLayout(LAYERS, 33, PAGE, KV_HEADS, DIM, torch.float32)
SHAPE = AttentionShape.of(LAYOUT, HEADS)
CPU = torch.device("cpu")
NAME = EngineId("creditor")
KINDS = ["unix", "tcp"]


@pytest.fixture
def lending() -> Iterator[Callable[..., LendingEngine]]:
    made: list[LendingEngine] = []

    def make(layout: KVLayout = LAYOUT, **options: Any) -> LendingEngine:
        options.setdefault("limits", small_limits())
        made.append(LendingEngine(NAME, layout, HEADS, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@contextmanager
def connected(
    engine: LendingEngine, kind: str = "unix", layout: KVLayout = LAYOUT, timeout_s: float = 20.0
) -> Iterator[RemoteAttention]:
    debtor = remote(layout, HEADS, timeout_s)
    debtor.connect(NAME, endpoint(engine.creditor.endpoints, kind), EPOCH)
    try:
        yield debtor
    finally:
        debtor.close()


def lent(engine: LendingEngine, loan: str, blocks: int = 1) -> list[int]:
    """Lend blocks that hold random keys and values."""
    pages = engine.lend(loan, blocks * PER_BLOCK)
    shape = engine.pool[:, pages].shape
    generator = torch.Generator().manual_seed(len(pages))
    engine.pool[:, pages] = torch.randn(shape, generator=generator).to(engine.pool.dtype)
    return list(pages)


def queries(rows: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, HEADS, DIM, generator=generator).to(dtype)


def ask(debtor: RemoteAttention, spans: Sequence[RemoteSpan], rows: int = 8) -> None:
    """Make a step of one layer, whose answer is not looked at."""
    debtor.begin_step({NAME: spans})
    debtor.send(0, queries(rows))
    debtor.receive(0)


def good_span(engine: LendingEngine, loan: str = "good") -> RemoteSpan:
    return decode_span(0, 200, borrow(loan, lent(engine, loan), range(PER_BLOCK)))


# Answers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
def test_the_parts_are_those_of_a_held_plan(
    lending: Callable[..., LendingEngine], dtype: torch.dtype, kind: str
):
    """Of a decode and a chunk of two sequences, in rows that are not all shipped, in each layer."""
    layout = KVLayout(LAYERS, 33, PAGE, KV_HEADS, DIM, dtype)
    engine = lending(layout)
    one, two = lent(engine, "one", 3), lent(engine, "two")
    q = queries(12, dtype)
    spans = [
        decode_span(1, 900, borrow("one", one[:PER_BLOCK], range(PER_BLOCK)),
                    borrow("two", two, range(3 * PER_BLOCK, 4 * PER_BLOCK))),
        RemoteSpan(5, TokenPos(300), 5, (borrow("one", one[PER_BLOCK:], range(2 * PER_BLOCK)),)),
    ]  # fmt: skip
    held = held_planner_for(layout, HEADS // KV_HEADS, CPU)(
        [
            HeldSpan(
                each.row,
                each.start,
                each.count,
                np.concatenate([some.pages for some in each.borrowed]),
                each.numbers,
            )
            for each in spans
        ]
    )
    with connected(engine, kind, layout) as debtor:
        for _ in range(2):
            debtor.begin_step({NAME: spans})
            for layer in range(LAYERS):
                debtor.send(layer, q)
                found = debtor.receive(layer)[NAME].parts()
                expected = held.attend(engine.pool[layer], q)
                assert [[part[:2] for part in parts] for parts in found] == held.part_ranges
                for ours, theirs in zip(found, expected, strict=True):
                    for part, other in zip(ours, theirs, strict=True):
                        for name in ("values", "top", "total"):
                            pair = (getattr(each.attention, name) for each in (part, other))
                            torch.testing.assert_close(*pair, atol=0, rtol=0)
    assert engine.creditor.statistics().answers == 2 * LAYERS


def test_buffers_within_a_host_are_sealed(lending: Callable[..., LendingEngine]):
    engine = lending()
    shape = AttentionShape.of(LAYOUT, HEADS)
    connection, _, buffers = enter(engine.creditor.endpoints[0], EPOCH, DEBTOR, shape, 20.0)
    with connection:
        assert not os.get_inheritable(buffers.fd)
        for size in (0, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(buffers.fd, size)
    loose = os.memfd_create("loose", os.MFD_CLOEXEC)
    os.ftruncate(loose, os.fstat(buffers.fd).st_size)
    with pytest.raises(PeerUnreachable, match="another size"):
        Buffers.attach(shape, small_limits(), loose)
    with pytest.raises(OSError, match="Bad file descriptor"):
        fcntl.fcntl(loose, fcntl.F_GETFD)
    buffers.close()


def test_a_step_that_is_abandoned_leaves_nothing(lending: Callable[..., LendingEngine]):
    engine = lending()
    with connected(engine) as debtor:
        span = good_span(engine)
        for _ in range(3):
            debtor.begin_step({NAME: [span]})
            debtor.send(0, queries(1))
        debtor.begin_step({NAME: [span]})
        with pytest.raises(BadRequest, match="layer 1 was not sent"):
            debtor.receive(1)
        debtor.send(1, queries(1))
        with pytest.raises(BadRequest, match="layer 1 has not been received"):
            debtor.send(0, queries(1))
        assert len(debtor.receive(1)[NAME].parts()) == 1


# Refusals


def forged(engine: LendingEngine) -> tuple[list[RemoteSpan], type[Exception], str]:
    pages = lent(engine, "a")
    return [decode_span(0, 200, borrow("a", [*pages[:-1], 32], range(8)))], Forbidden, "loan a"


def foreign(engine: LendingEngine) -> tuple[list[RemoteSpan], type[Exception], str]:
    pages = engine.lend("theirs", 8, debtor="somebody")
    return [decode_span(0, 200, borrow("theirs", pages, range(8)))], Forbidden, "loan theirs"


def ended(engine: LendingEngine) -> tuple[list[RemoteSpan], type[Exception], str]:
    pages = lent(engine, "gone")
    engine.free("gone")
    return [decode_span(0, 200, borrow("gone", pages, range(8)))], Forbidden, "loan gone"


def outside(engine: LendingEngine) -> tuple[list[RemoteSpan], type[Exception], str]:
    return [decode_span(0, 200, borrow("a", [33], [0]))], BadRequest, "page id outside"


def scratch(engine: LendingEngine) -> tuple[list[RemoteSpan], type[Exception], str]:
    return [decode_span(0, 200, borrow("a", [0], [0]))], BadRequest, "page id outside"


def repeated(engine: LendingEngine) -> tuple[list[RemoteSpan], type[Exception], str]:
    pages = lent(engine, "a")
    return [decode_span(0, 200, borrow("a", pages[:2], [1, 1]))], BadRequest, "same number"


def late_keys(engine: LendingEngine) -> tuple[list[RemoteSpan], type[Exception], str]:
    pages = lent(engine, "a")
    return [decode_span(0, 20, borrow("a", pages, range(8)))], BadRequest, "no keys before"


def far(engine: LendingEngine) -> tuple[list[RemoteSpan], type[Exception], str]:
    pages = lent(engine, "a")
    return [decode_span(0, 1 << 30, borrow("a", pages, range(8)))], TooLarge, "positions"


def no_pages(engine: LendingEngine) -> tuple[list[RemoteSpan], type[Exception], str]:
    return [decode_span(0, 200, borrow("a", [], []))], BadRequest, "no rows or pages"


def many_spans(engine: LendingEngine) -> tuple[list[RemoteSpan], type[Exception], str]:
    return [decode_span(0, 200, borrow("a", [1], [0]))] * 5, TooLarge, "5 spans"


def many_keys(engine: LendingEngine) -> tuple[list[RemoteSpan], type[Exception], str]:
    pages = lent(engine, "a", 2)
    span = RemoteSpan(0, TokenPos(300), 8, (borrow("a", pages, range(16)),))
    return [span], TooLarge, "keys of rows"


def many_runs(engine: LendingEngine) -> tuple[list[RemoteSpan], type[Exception], str]:
    pages = lent(engine, "a")
    return [decode_span(0, 400, borrow("a", pages, range(0, 16, 2)))], TooLarge, "runs of pages"


@pytest.mark.parametrize(
    "bad",
    [
        forged, foreign,  ended, outside, scratch, repeated, late_keys, far,
        no_pages, many_spans, many_keys, many_runs,
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_plan_is_refused_and_the_connection_serves_on(
    lending: Callable[..., LendingEngine], bad: Callable[[LendingEngine], Any], kind: str
):
    engine = lending(limits=small_limits(spans=4, row_keys=2000, runs=4))
    good = good_span(engine)
    spans, error, message = bad(engine)
    with connected(engine, kind) as debtor:
        ask(debtor, [good])
        with pytest.raises(CreditorFailed, match=message) as caught:
            ask(debtor, spans)
        assert type(caught.value.reason) is error
        assert not caught.value.lost
        if error is Forbidden:
            assert caught.value.loans == (spans[0].borrowed[0].loan,)
        ask(debtor, [good])
    assert engine.creditor.statistics().refusals >= 1


def test_another_dtype_or_shape_is_refused(lending: Callable[..., LendingEngine]):
    """At the handshake; and in a plan, by a debtor that says otherwise there."""
    engine = lending()
    other = KVLayout(LAYERS, 33, PAGE, KV_HEADS, DIM, torch.bfloat16)
    with pytest.raises(BadRequest, match="the creditor's pages are"):
        remote(other, HEADS).connect(NAME, engine.creditor.endpoints, EPOCH)
    span = good_span(engine)
    with Raw(engine, SHAPE) as raw:
        for shape in (AttentionShape.of(other, HEADS), AttentionShape.of(LAYOUT, 2 * HEADS)):
            raw.send(Kind.PLAN, body=StepPlan.pack(shape, [span]))
            assert isinstance(raw.refusal().error, BadRequest)
    with connected(engine) as debtor:
        debtor.begin_step({NAME: [span]})
        with pytest.raises(BadRequest, match=r"queries in torch\.bfloat16"):
            debtor.send(0, queries(8, torch.bfloat16))
        ask(debtor, [span])


def test_a_pool_with_a_part_of_the_model_is_not_lent_from(
    lending: Callable[..., LendingEngine],
):
    part = KVLayout(LAYERS, 33, PAGE, KV_HEADS, DIM, torch.float32, Shard(0, 1, 0, KV_HEADS))
    with pytest.raises(Unsupported):
        AttentionShape.of(part, HEADS)
    half = KVLayout(LAYERS, 33, PAGE, KV_HEADS, DIM, torch.float16)
    with pytest.raises(Unsupported):
        AttentionShape.of(half, HEADS)


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_debtor_sends(lending: Callable[..., LendingEngine], kind: str):
    """Refused in its order; another debtor is served meanwhile."""
    engine = lending()
    span = good_span(engine)
    with connected(engine) as debtor, Raw(engine, SHAPE, kind) as raw:
        raw.send(Kind.QUERY)
        assert "was not planned" in raw.refusal().error.message
        raw.send(Kind.PLAN, body=bytes(100))
        assert isinstance(raw.refusal().error, BadRequest)
        raw.send(Kind.QUERY)
        assert isinstance(raw.refusal().error, BadRequest)
        ask(debtor, [span])
        with engine.lock:  # a loan of this debtor
            pages = engine.lender.allocate(EngineId("raw"), EPOCH, LeaseId("r"), 8, at=EPOCH)
        assert pages
        engine.pool[:, pages] = 0.5
        plan = StepPlan.pack(SHAPE, [decode_span(0, 200, borrow("r", pages, range(8)))])
        body = bytes(SHAPE.query_bytes) if kind == "tcp" else b""
        for step, layer, sent, good in [
            (1, 0, body, True), (1, LAYERS, body, False), (2, 0, body, False), (1, 1, body, True),
            *([(1, 0, body[:-4], False), (1, 1, body, True)] if kind == "tcp" else []),
        ]:  # fmt: skip
            raw.send(Kind.PLAN, body=plan)
            assert raw.reply()[0].kind is Kind.PLANNED
            raw.send(Kind.QUERY, step, layer, sent)
            assert (raw.reply()[0].kind is Kind.ANSWER) == good
        ask(debtor, [span])


@pytest.mark.parametrize(
    ("kind", "size", "error"),
    [
        (Kind.PLAN, 1 << 31, TooLarge),
        (Kind.QUERY, 1 << 31, TooLarge),
        (Kind.ANSWER, 0, BadRequest),
    ],
)
def test_an_oversized_message_ends_its_own_connection_only(
    lending: Callable[..., LendingEngine], kind: Kind, size: int, error: type[Exception]
):
    """Its debtor learns why, also if it has sent more."""
    engine = lending()
    span = good_span(engine)
    with connected(engine) as debtor, Raw(engine, SHAPE) as raw:
        raw.send(kind, size=size)
        raw.socket.sendall(bytes(1 << 20))
        assert isinstance(raw.refusal().error, error)
        assert read_until_closed(raw.socket) == b""
        ask(debtor, [span])


def test_noise_ends_its_own_connection_only(lending: Callable[..., LendingEngine]):
    engine = lending()
    with connected(engine) as debtor, Raw(engine, SHAPE) as raw:
        raw.socket.sendall(b"GET / HTTP/1.1\r\nHost: here.example\r\n\r\n")
        assert isinstance(raw.refusal().error, BadRequest)
        ask(debtor, [good_span(engine)])


# Loans that end


def test_pages_of_loans_are_those_of_the_debtors_process(
    lending: Callable[..., LendingEngine],
):
    engine = lending()
    pages = engine.lend("a", 3)
    bad_loans = PagesOfLoans(engine.lender, engine.lock)
    me = Debtor(DEBTOR.engine_id, DEBTOR.epoch)
    a, b = LeaseId("a"), LeaseId("b")
    some = frozenset(pages[:2])
    assert bad_loans(me, {a: some}) == ()
    assert bad_loans(me, {a: frozenset()}) == ()
    assert bad_loans(me, {a: some | {PageId(30)}}) == (a,)
    assert bad_loans(me, {a: some, b: some}) == (b,)
    assert bad_loans(me._replace(epoch=me.epoch - 1), {a: some}) == (a,)
    assert bad_loans(me._replace(engine_id=EngineId("b")), {a: some}) == (a,)
    engine.free("a")
    assert bad_loans(me, {a: frozenset()}) == (a,)


def test_a_loan_that_ends_during_a_computation_is_refused(
    lending: Callable[..., LendingEngine],
):
    """The guard is held from the first look at the loan to the last."""
    events: list[str] = []
    ends = threading.Event()

    @contextmanager
    def guard() -> Iterator[None]:
        events.append("begin")
        yield
        events.append("end")

    engine = lending(guard=guard)
    span = good_span(engine)
    usual = engine.creditor._answering._bad_loans

    def bad_loans(*what: Any) -> tuple[LeaseId, ...]:
        events.append("look")
        found = usual(*what)
        if ends.is_set() and events[-2:] == ["begin", "look"]:
            engine.free("good")  # while it computes
        return found

    engine.creditor._answering._bad_loans = bad_loans
    with connected(engine) as debtor:
        debtor.begin_step({NAME: [span]})
        debtor.send(0, queries(1))
        debtor.receive(0)
        assert events == ["look", "begin", "look", "look", "end"]
        ends.set()
        debtor.send(1, queries(1))
        with pytest.raises(CreditorFailed) as caught:
            debtor.receive(1)
        assert isinstance(caught.value.reason, LeaseExpired)
        assert (caught.value.loans, caught.value.lost) == (("good",), False)
        ask(debtor, [good_span(engine, "next")])


# Share of time


def test_a_request_that_waits_too_long_for_its_turn_is_refused(
    lending: Callable[..., LendingEngine],
):
    engine = lending(share=0.1, burst_s=1e-6, wait_s=0.05)
    span = good_span(engine)
    with connected(engine) as debtor:
        engine.creditor._budget.spend(0.1)
        with pytest.raises(CreditorFailed) as caught:
            ask(debtor, [span])
        assert isinstance(caught.value.reason, NoCapacity)
        engine.creditor._wait_s = 60.0
        ask(debtor, [span])


def test_a_request_waits_for_its_turn(lending: Callable[..., LendingEngine]):
    engine = lending(share=0.5, burst_s=0.01, wait_s=60.0)
    span = good_span(engine)
    with connected(engine) as debtor:
        ask(debtor, [span])
        engine.creditor._budget.spend(0.5)  # a second, of which this test may miss a part
        began = time.monotonic()
        ask(debtor, [span])
        assert time.monotonic() - began >= 0.15
        assert engine.creditor.statistics().waited_s >= 0.15


def test_a_request_does_not_wait_for_a_creditor_without_requests_of_its_own(
    lending: Callable[..., LendingEngine],
):
    own = [1]
    engine = lending(share=0.01, burst_s=0.01, wait_s=60.0, busy=lambda: bool(own))
    span = good_span(engine)
    with connected(engine) as debtor:
        engine.creditor._budget.spend(0.1)
        began = time.monotonic()
        threading.Timer(0.3, own.clear).start()
        ask(debtor, [span])  # alone, 9 s
        assert 0.2 <= time.monotonic() - began < 5


# Connections


def test_who_does_not_have_the_secret_is_not_admitted(lending: Callable[..., LendingEngine]):
    engine = lending()
    stranger = Identity(EngineId("s"), 1, b"another", "same")
    debtor = RemoteAttention(stranger, AttentionShape.of(LAYOUT, HEADS))
    with pytest.raises(PeerUnreachable):
        debtor.connect(NAME, engine.creditor.endpoints, EPOCH)
    with connected(engine) as friend:
        ask(friend, [good_span(engine)])


def test_a_proof_for_another_purpose_is_none(lending: Callable[..., LendingEngine]):
    engine = lending()
    host, _, port = endpoint(engine.creditor.endpoints, "tcp")[0][4:].rpartition(":")
    with (
        socket.create_connection((host, int(port))) as connection,
        pytest.raises(PeerUnreachable),
    ):
        handshake.send_handshake(connection, SECRET, EPOCH, "{}")


def test_a_restarted_creditor_is_told_apart(lending: Callable[..., LendingEngine]):
    engine = lending()
    debtor = remote(LAYOUT, HEADS)
    with pytest.raises(StaleEpoch):
        debtor.connect(NAME, engine.creditor.endpoints, EPOCH - 1)


@pytest.mark.parametrize(
    "endpoints", [[], ["unix:nobody"], ["tcp:127.0.0.1:1"], ["tcp:127.0.0.1:x"], ["shm:1:2"]]
)
def test_a_creditor_that_cannot_be_reached(endpoints: list[str]):
    with pytest.raises(PeerUnreachable):
        remote(LAYOUT, HEADS).connect(NAME, endpoints, EPOCH)


def test_the_next_endpoint_is_tried(lending: Callable[..., LendingEngine]):
    """As between hosts, where the first one names a socket of another host."""
    engine = lending()
    debtor = remote(LAYOUT, HEADS)
    tcp = endpoint(engine.creditor.endpoints, "tcp")
    debtor.connect(NAME, ["unix:of-another-host", *tcp], EPOCH)
    ask(debtor, [good_span(engine)])
    debtor.close()


def test_silent_connections_keep_nobody_waiting(lending: Callable[..., LendingEngine]):
    engine = lending()
    host, _, port = endpoint(engine.creditor.endpoints, "tcp")[0][4:].rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(5)]
    with connected(engine) as debtor:
        ask(debtor, [good_span(engine)])
    for each in silent:
        each.close()


def test_a_debtor_has_one_connection(lending: Callable[..., LendingEngine]):
    engine = lending()
    span = good_span(engine)
    with connected(engine) as first, connected(engine, "tcp") as second:
        ask(second, [span])
        with pytest.raises(CreditorFailed) as caught:
            ask(first, [span])
        assert caught.value.lost
        ask(second, [span])
        assert engine.creditor.statistics().debtors == 1


def test_a_closed_creditor_is_lost(lending: Callable[..., LendingEngine]):
    engine = lending()
    span = good_span(engine)
    with connected(engine) as debtor:
        ask(debtor, [span])
        engine.creditor.close()
        engine.creditor.close()
        with pytest.raises(CreditorFailed) as caught:
            ask(debtor, [span])
        assert (caught.value.lost, caught.value.loans) == (True, ("good",))
        assert debtor.connected() == []
        with pytest.raises(CreditorFailed, match="not connected"):
            debtor.begin_step({NAME: [span]})


def test_debtors_take_turns(lending: Callable[..., LendingEngine]):
    """Four debtors at once, each with its own queries and the answers to them."""
    engine = lending()
    pages = {}
    for number in range(4):
        name = f"debtor-{number}"
        with engine.lock:
            pages[name] = engine.lender.allocate(EngineId(name), EPOCH, LeaseId("l"), 8, at=EPOCH)
        engine.pool[:, pages[name]] = float(number + 1)
    failures: list[BaseException] = []

    def run(name: str, value: float) -> None:
        try:
            debtor = RemoteAttention(identity(name), AttentionShape.of(LAYOUT, HEADS))
            debtor.connect(NAME, engine.creditor.endpoints, EPOCH)
            span = decode_span(0, 200, borrow("l", pages[name], range(8)))
            for step in range(20):
                debtor.begin_step({NAME: [span]})
                debtor.send(step % LAYERS, queries(1))
                ((part,),) = debtor.receive(step % LAYERS)[NAME].parts()
                torch.testing.assert_close(
                    part.attention.output(), torch.full((1, HEADS, DIM), value)
                )
            debtor.close()
        except BaseException as error:  # noqa: BLE001  raised below
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=(f"debtor-{number}", number + 1.0)) for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures

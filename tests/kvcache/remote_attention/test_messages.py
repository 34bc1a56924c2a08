"""The form of messages: what is packed comes back, and anything else is a typed error."""

from __future__ import annotations

import numpy as np
import pytest
from creditors import borrow, decode_span
from hypothesis import given
from hypothesis import strategies as st

from kvcache import errors
from kvcache.errors import BadRequest, LeaseExpired, TooLarge
from kvcache.remote_attention import AttentionShape, RemoteSpan
from kvcache.remote_attention.exchange import (
    HEAD,
    Head,
    Kind,
    Limits,
    Refusal,
    StepPlan,
    pack_ranges,
    unpack_ranges,
)
from kvcache.types import LeaseId, TokenPos

SHAPE = AttentionShape("bfloat16", 2, 9, 3, 64, 16)
SPANS = [
    RemoteSpan(4, TokenPos(300), 3, (borrow("a", [5, 6], [0, 1]), borrow("b", [9], [7]))),
    decode_span(9, 40, borrow("a", [7], [2])),
]
PLAN = StepPlan.pack(SHAPE, SPANS)


def test_a_plan_comes_back_with_rows_from_0():
    plan = StepPlan.unpack(PLAN, Limits())
    assert (plan.dtype, plan.heads, plan.group, plan.rows) == ("bfloat16", 9, 3, 4)
    one, two = plan.spans
    assert (one.row, one.start, one.count) == (0, 300, 3)
    assert (one.pages.tolist(), one.numbers.tolist()) == ([5, 6, 9], [0, 1, 7])
    assert (two.row, two.start, two.count, two.pages.tolist()) == (3, 40, 1, [7])
    assert {loan: pages.tolist() for loan, pages in plan.pages_of.items()} == {
        "a": [5, 6, 7],
        "b": [9],
    }


@given(st.integers(0, len(PLAN) - 1), st.integers(0, 255), st.booleans())
def test_a_damaged_plan_is_a_plan_or_bad(at: int, value: int, cut: bool):
    data = bytearray(PLAN)
    data[at] = value
    try:
        plan = StepPlan.unpack(data[:at] if cut else data, Limits())
    except (BadRequest, TooLarge):
        return
    assert sum(len(span.pages) for span in plan.spans) == 4


@given(st.binary(max_size=200))
def test_noise_is_no_message(data: bytes):
    for read in (
        lambda some: StepPlan.unpack(some, Limits()),
        Refusal.unpack,
        lambda some: unpack_ranges(some, 3),
    ):
        try:
            read(data)
        except (BadRequest, TooLarge):
            continue
    if len(data) >= HEAD.size and data[:2] != b"AM":
        with pytest.raises(BadRequest):
            Head.unpack(data[: HEAD.size])


def test_a_head_comes_back():
    head = Head(Kind.ANSWER, 1 << 40, 29, 5, 6, 7)
    assert Head.unpack(head.pack()) == head
    with pytest.raises(BadRequest):
        Head.unpack(Head(Kind.PLAN, 1).pack().replace(b"AM\1", b"AM\3"))


def test_the_keys_of_parts_come_back():
    ranges = [[(TokenPos(0), TokenPos(128))], [], [(TokenPos(256), TokenPos(512))] * 2]
    assert unpack_ranges(pack_ranges(ranges), 3) == ranges
    with pytest.raises(BadRequest):
        unpack_ranges(pack_ranges(ranges)[:-4], 3)


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "MicroserveError"])
def test_every_error_can_be_refused_with(name: str):
    error = getattr(errors, name)("why")
    back = Refusal.unpack(Refusal(error, (LeaseId("a"),)).pack())
    assert type(back.error) is type(error)
    assert (back.error.message, back.loans) == ("why", ("a",))


def test_a_refusal_is_short():
    loans = tuple(LeaseId("x" * 200 + str(at)) for at in range(1000))
    refusal = Refusal.unpack(Refusal(LeaseExpired("y" * 10_000), loans).pack())
    assert (len(refusal.error.message), refusal.loans) == (1000, ())


@pytest.mark.parametrize("fields", [{"rows": 0}, {"rows": "1"}, {"rows": 1 << 40}, {"more": 1}])
def test_limits_that_are_none(fields: dict[str, object]):
    with pytest.raises(BadRequest):
        Limits.of(fields)


def test_the_longest_plan_is_within_its_limit():
    limits = Limits(spans=2, rows=2, pages=4, loans=2)
    loan = "ü" * 256
    spans = [
        decode_span(0, 900, borrow(loan, [1, 2], [0, 1])),
        decode_span(1, 900, borrow("é" * 256, [3, 4], [0, 1])),
    ]
    assert len(StepPlan.pack(SHAPE, spans)) <= limits.plan_bytes
    assert np.array_equal(
        StepPlan.unpack(StepPlan.pack(SHAPE, spans), limits).pages_of[loan], [1, 2]
    )

"""Calls made to break an engine's parser: each is read, or is refused as the caller's mistake."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from engine.protocol import (
    Extend,
    MicroserveError,
    MirrorGeneration,
    Pin,
    PrepRecv,
    Release,
    RemoteSend,
    StartGenerate,
    error_body,
    parse,
)
from engine.protocol.limits import Limits, resolve_position

CALLS = (PrepRecv, RemoteSend, StartGenerate, MirrorGeneration, Extend, Pin, Release)
ODD = st.sampled_from([
    -(2**63), 2**63, 2**64, 10**300, -1, -0.0, 5e-324, 1e308, "", "\0", "x" * 200, True, None, [],
    {}, [[]], [-1], [2**70], ["x"] * 100, {"kind": "regex", "source": "("}, {"kv_addr": "x"},
])  # fmt: skip
GOOD = {"request_id": "r", "prompt": [1, 2], "begin": 0, "end": 1, "kv_addr": "x", "reserve": 1}


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000, b'{"prompt": ' * 300, b"\xff", b"", b"null", b'"x"', b"NaN",
        b'{"request_id": "\\ud800", "prompt": [1], "end": 1}',
        b'{"request_id": "r", "prompt": [%b], "end": 1}' % (b"1" * 5000),
        b'{"request_id": "r", "prompt": [1], "end": 1e999}',
        b'{"request_id": "r", "prompt": [1], "end": %b}' % (b"9" * 5000),
    ],
)  # fmt: skip
def test_each_is_refused(body: bytes):
    for call in CALLS:
        with pytest.raises(MicroserveError) as refused:
            parse(call, body)
        assert refused.value.status == 400
        json.dumps(error_body(refused.value))


@given(st.sampled_from(CALLS), st.data())
def test_no_call_is_a_failure_of_the_engine(call: Any, data: st.DataObject):
    names = st.sampled_from(sorted(call.model_fields))
    odd = data.draw(st.dictionaries(names, ODD | st.integers(), max_size=3))
    fields = {name: value for name, value in GOOD.items() if name in call.model_fields} | odd
    limits = Limits(500, context=100, pool_tokens=64)
    try:
        read = parse(call, json.dumps(fields).encode())
        if hasattr(read, "prompt"):
            limits.check_prompt(read.prompt)
        if isinstance(read, StartGenerate):
            limits.check_sampling(read)
        for name in ("begin", "end"):
            if getattr(read, name, None) is not None:
                resolve_position(getattr(read, name), len(read.prompt), name)
    except MicroserveError as refused:
        assert refused.status < 500


@pytest.mark.parametrize("name", ["prompt", "output", "stop_token_ids"])
def test_many_bad_tokens_cost_no_more_than_one(name: str):
    """An error takes more memory than the token that it is about."""
    body = json.dumps({"request_id": "r", "prompt": [1], name: ["x"] * 50})
    with pytest.raises(ValidationError) as wrong:
        StartGenerate.model_validate_json(body)
    assert wrong.value.error_count() == 1

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from pydantic import BaseModel

import engine.protocol as protocol
from engine.protocol import (
    BadRequest,
    Event,
    Internal,
    MicroserveError,
    NoCapacity,
    PrepRecv,
    Release,
    RemoteSend,
    StartGenerate,
    TokenLogprob,
    error_body,
    error_from_body,
    parse,
)
from kvcache import errors

ERRORS = [getattr(errors, name) for name in errors.__all__]
START = {"request_id": "r", "prompt": [1, 2]}


def body(**fields: Any) -> bytes:
    return json.dumps({**START, **fields}).encode()


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_survives_serialization(kind: type[MicroserveError]):
    sent = kind("what", param="p", code="c")
    got = error_from_body(json.loads(json.dumps(error_body(sent))))
    assert type(got) is kind or kind is MicroserveError
    assert (got.message, got.param, got.code) == ("what", "p", "c")
    assert got.status == kind.status


def test_each_type_names_one_error():
    named = [kind.type for kind in ERRORS if kind is not MicroserveError]
    assert len(set(named)) == len(named)


def test_the_protocol_gives_the_whole_tree_to_the_router():
    assert set(errors.__all__) <= set(protocol.__all__)


@pytest.mark.parametrize("junk", [None, [], "x", {}, {"error": "x"}, {"error": {"type": "new"}}])
def test_an_invalid_error_body_becomes_internal(junk: object):
    assert type(error_from_body(junk)) is Internal


@pytest.mark.parametrize(("header", "seconds"), [("3", 3.0), (None, 1.0), ("soon", 1.0)])
def test_retry_after_is_read_from_the_header(header: str | None, seconds: float):
    error = error_from_body(error_body(NoCapacity("full")), retry_after=header)
    assert isinstance(error, NoCapacity)
    assert error.retry_after_s == seconds


@pytest.mark.parametrize(
    ("message", "text", "param"),
    [
        (StartGenerate, b"", None),
        (StartGenerate, b"{", None),
        (StartGenerate, b"[]", None),
        (StartGenerate, b"\xff\xfe", None),
        (StartGenerate, b"{}", "request_id"),
        (StartGenerate, body(prompt="text"), "prompt"),
        (StartGenerate, body(prompt=[1, "2"]), "prompt.1"),
        (StartGenerate, body(prompt=[1, True]), "prompt.1"),
        (StartGenerate, body(prompt=[1, 2.0]), "prompt.1"),
        (StartGenerate, body(prompt=[-1]), "prompt.0"),
        (StartGenerate, body(request_id=""), "request_id"),
        (StartGenerate, body(request_id="x" * 129), "request_id"),
        (StartGenerate, body(request_id=7), "request_id"),
        (StartGenerate, body(begin="1"), "begin"),
        (StartGenerate, body(max_tokens=0), "max_tokens"),
        (StartGenerate, body(max_tokens=1.5), "max_tokens"),
        (StartGenerate, body(seed=2**64), "seed"),
        (StartGenerate, body(stop=[""]), "stop.0"),
        (StartGenerate, body(stop=["x"] * 17), "stop"),
        (StartGenerate, body(logit_bias={"1": 101}), "logit_bias.1"),
        (StartGenerate, body(logit_bias={"x": 1}), "logit_bias.x.[key]"),
        (StartGenerate, body(logprobs=21), "logprobs"),
        (StartGenerate, body(unknown=1), "unknown"),
        (PrepRecv, body(), "end"),
        (PrepRecv, body(end=1, reserve=-1), "reserve"),
        (PrepRecv, body(end=1, lease_ms=0), "lease_ms"),
        (RemoteSend, body(begin=0, end=1), "kv_addr"),
        (Release, b'{"lease_id": 1}', "lease_id"),
    ],
)
def test_bad_messages_name_the_field(message: type[BaseModel], text: bytes, param: str | None):
    with pytest.raises(BadRequest) as caught:
        parse(message, text)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "field",
    [
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ],
)
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_non_finite_numbers_are_refused(field: str, value: str):
    with pytest.raises(BadRequest) as caught:
        parse(StartGenerate, body()[:-1] + f', "{field}": {value}}}'.encode())
    assert caught.value.param == field


def test_a_non_finite_bias_is_refused():
    with pytest.raises(BadRequest):
        parse(StartGenerate, body()[:-1] + b', "logit_bias": {"1": NaN}}')


def test_a_huge_integer_is_refused_or_read():
    call = parse(PrepRecv, b'{"request_id": "r", "prompt": [1], "end": ' + b"9" * 400 + b"}")
    assert call.end == int("9" * 400)


def test_minus_infinity_survives_serialization():
    top = TokenLogprob(token_id=1, token="a", bytes=[97], logprob=-float("inf"))
    event = Event(token_ids=[1], text="a", logprobs=[top], begin=0)
    assert Event.model_validate_json(event.model_dump_json(exclude_none=True)) == event


@pytest.mark.processes
def test_the_protocol_needs_no_torch():
    code = "import sys, engine.protocol; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Each refusal of a server becomes the error that says what to do about it."""

from __future__ import annotations

import json

import pytest

from engine.protocol import BadRequest, Internal, NoCapacity, Timeout, TooLarge, Unauthorized
from router.base import EngineUnreachable
from router.engines.openai.errors import error_in_stream, error_of


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadRequest), (422, BadRequest), (401, Unauthorized), (403, Unauthorized),
        (404, Internal), (408, Timeout), (413, TooLarge), (429, NoCapacity), (503, NoCapacity),
        (500, Internal), (502, EngineUnreachable), (504, Timeout), (302, EngineUnreachable),
        (999, Internal),
    ],
)  # fmt: skip
def test_the_status_decides(status, kind):
    error = error_of(status, b'{"error": {"message": "why", "param": "p", "code": "c"}}')
    assert type(error) is kind
    assert (error.message, error.param, error.code) == ("why", "p", "c")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"object": "error", "message": "older", "code": 400}', "older"),
        ('{"error": "tgi", "error_type": "validation"}', "tgi"),
        ('{"detail": "fastapi"}', "fastapi"),
        ('{"detail": [{"msg": "missing"}]}', '[{"msg":"missing"}]'),
        ("plain text", "plain text"),
        ('"quoted"', "quoted"),
        ("", "the server answers 400 and no reason"),
        ("null", "the server answers 400 and no reason"),
        ('{"error": {"message": ["odd"], "param": 5, "code": []}}', '["odd"]'),
    ],
)
def test_the_message_is_found_in_every_form(body, message):
    error = error_of(400, body.encode())
    assert error.message == message
    assert error.param is None and error.code is None


@pytest.mark.parametrize("status", [101, 204, 301])
def test_a_reply_that_is_no_refusal_is_the_servers_fault(status):
    assert type(error_of(status, b"")) is EngineUnreachable


def test_a_full_server_says_when_to_come_back():
    error = error_of(429, b"{}", "7")
    assert isinstance(error, NoCapacity) and error.retry_after_s == 7
    error = error_of(503, b"{}")
    assert isinstance(error, NoCapacity) and error.retry_after_s == 1


def test_long_and_deep_bodies():
    assert len(error_of(400, json.dumps({"error": "x" * 10_000}).encode()).message) == 2000
    deep = b'{"error": {"message": ' + b"[" * 900 + b"]" * 900 + b"}}"
    assert error_of(500, deep).message


def test_errors_in_mid_stream():
    assert isinstance(error_in_stream({"error": {"message": "m", "code": 400}}), BadRequest)
    assert isinstance(error_in_stream({"error": {"message": "m", "code": "429"}}), NoCapacity)
    assert isinstance(
        error_in_stream({"error": {"message": "m", "type": "invalid_request_error"}}), BadRequest
    )
    assert type(error_in_stream({"error": {"message": "m", "code": "died"}})) is Internal
    assert type(error_in_stream({"error": "boom"})) is Internal
    assert type(error_in_stream({})) is Internal

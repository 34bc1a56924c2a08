"""`HttpRequest` and `HttpStream` over ASGI calls of the tests."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from engine.protocol import BadRequest, Overloaded, TooLarge
from router.api import http as module
from router.api.http import HttpRequest, HttpResponse, json_response, off_loop


class Connection:
    def __init__(self, *, arrived: bool) -> None:
        self.arrived = arrived
        self.gone = False
        self.calls: list[str] = []

    def release_body(self) -> None:
        self.calls.append("release_body")

    def half_close(self) -> None:
        self.calls.append("half_close")

    def abort(self) -> None:
        self.calls.append("abort")


class Exchange:
    """A request with these parts of a body, and what is sent to its client."""

    def __init__(
        self, *parts: bytes, connection: Any = None, max_body: int = 100, **scope: Any
    ) -> None:
        self.sent: list[dict[str, Any]] = []
        self.received = 0
        self._parts = list(parts)
        state = {} if connection is None else {"connection": connection}
        whole = {"method": "POST", "path": "/x", "headers": [], "state": state, **scope}
        self.http = HttpRequest(
            whole, self.receive, self.send, max_body=max_body, extra_headers=self.extra
        )
        self.connection = connection

    @staticmethod
    def extra(http: HttpRequest) -> list[tuple[bytes, bytes]]:
        return [(b"X-Status", b"%d" % http.status)]

    async def receive(self) -> dict[str, Any]:
        self.received += 1
        if not self._parts:
            return {"type": "http.disconnect"}
        part = self._parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(self._parts)}

    async def send(self, message: Any) -> None:
        await asyncio.sleep(0)
        self.sent.append(message)

    @property
    def headers(self) -> dict[bytes, bytes]:
        """The headers that were sent, without the date."""
        (head,) = (one for one in self.sent if one["type"] == "http.response.start")
        headers = dict(head["headers"])
        assert len(headers) == len(head["headers"])
        assert headers.pop(b"date").endswith(b" GMT")
        return headers

    @property
    def bodies(self) -> list[tuple[bytes, bool]]:
        return [
            (one["body"], one["more_body"])
            for one in self.sent
            if one["type"] == "http.response.body"
        ]


def test_what_a_request_is_before_anything_is_known():
    http = Exchange().http
    assert (http.method, http.path, http.route, http.status) == ("POST", "/x", "other", 0)
    assert not (http.complete or http.begun or http.close or http.arrived)
    assert (http.id, http.who, http.caller, http.receipt, http.trace) == ("", "", None, None, None)
    assert http.connection is None
    http.counted()  # nothing is counted yet
    http.abort()
    http.release()


def test_the_first_of_several_headers_counts():
    raw = [(b"a", b"1"), (b"b", b"\xff\xc3\xa9"), (b"a", b"2")]
    assert Exchange(headers=raw).http.headers == {"a": "1", "b": "\udcffé"}


@pytest.mark.parametrize(
    ("scope", "remote"),
    [({"client": ("10.1.2.3", 80)}, "10.1.2.3"), ({"client": None}, ""), ({}, "")],
)
def test_the_address_of_the_client(scope: dict[str, Any], remote: str):
    assert Exchange(**scope).http.remote == remote


@pytest.mark.parametrize(
    ("state", "error"), [({"broken": "odd"}, BadRequest), ({"overloaded": True}, Overloaded)]
)
async def test_what_the_server_found_wrong_is_raised(state: dict[str, Any], error: type[Exception]):
    exchange = Exchange(b"x", state=state)
    with pytest.raises(error):
        exchange.http.check()
    with pytest.raises(error):
        await exchange.http.read()


async def test_a_body_is_read_once_and_forgotten_when_it_is_released():
    connection = Connection(arrived=True)
    exchange = Exchange(b"ab", b"cd", connection=connection)
    http = exchange.http
    assert await http.read() == await http.read() == b"abcd"
    assert exchange.received == 2 and http.complete
    http.release()
    assert await http.read() == b"" and exchange.received == 2
    assert connection.calls == ["release_body"]


async def test_the_limit_of_a_body_may_be_lowered():
    exchange = Exchange(b"abcd", max_body=4)
    exchange.http.max_body = 3
    with pytest.raises(TooLarge):
        await exchange.http.read()
    assert not exchange.http.complete
    assert await Exchange(b"abcd", max_body=4).http.read() == b"abcd"


@pytest.mark.parametrize(
    ("arrived", "complete", "whole"),
    [(None, False, False), (None, True, True), (False, False, False), (False, True, True),
     (True, False, True), (True, True, True)],
)  # fmt: skip
def test_a_body_has_arrived_in_the_server_or_here(
    arrived: bool | None, complete: bool, whole: bool
):
    connection = None if arrived is None else Connection(arrived=arrived)
    http = Exchange(connection=connection).http
    http.complete = complete
    assert http.arrived is whole


async def test_a_response_in_one_piece():
    exchange = Exchange(connection=Connection(arrived=True))
    await exchange.http.respond(HttpResponse(b"{}", 201, headers={"X-A": "é\udcff"}))
    assert exchange.sent[0]["status"] == exchange.http.status == 201
    assert exchange.headers == {
        b"X-A": b"\xc3\xa9\xff", b"Content-Type": b"application/json", b"Content-Length": b"2",
        b"X-Status": b"201",
    }  # fmt: skip
    assert exchange.bodies == [(b"{}", False)]
    assert exchange.http.begun and exchange.connection.calls == []


async def test_a_response_may_have_another_type():
    exchange = Exchange(connection=Connection(arrived=True))
    await exchange.http.respond(HttpResponse(b"<p>", media="text/html"))
    assert exchange.headers[b"Content-Type"] == b"text/html"
    exchange = Exchange(connection=Connection(arrived=True))
    await exchange.http.respond(HttpResponse(b"<p>", headers={"Content-Type": "text/css"}))
    assert exchange.headers[b"Content-Type"] == b"text/css" and exchange.sent[0]["status"] == 200


@pytest.mark.parametrize("close", [False, True])
async def test_a_connection_may_be_closed_after_a_response(close: bool):
    exchange = Exchange(connection=Connection(arrived=True))
    exchange.http.close = close
    await exchange.http.respond(HttpResponse())
    assert exchange.headers.get(b"connection") == (b"close" if close else None)


async def test_a_client_that_still_sends_is_answered_heard_out_and_closed():
    connection = Connection(arrived=False)
    exchange = Exchange(b"x", b"y", b"z", connection=connection)
    await exchange.http.respond(HttpResponse(b"no", 413))
    assert exchange.headers[b"connection"] == b"close"
    assert exchange.bodies == [(b"no", True), (b"", False)]
    assert exchange.received == 3 and connection.calls == ["half_close", "abort"]


async def test_the_head_of_a_stream_comes_with_its_first_part():
    exchange = Exchange(connection=Connection(arrived=True))
    stream = exchange.http.stream([(b"Content-Type", b"text/event-stream")])
    assert not stream.begun and not exchange.sent
    await stream.write(b"one")
    assert stream.begun
    await stream.write(b"two")
    await stream.end(b"three")
    assert exchange.sent[0]["status"] == 200
    assert exchange.headers == {b"Content-Type": b"text/event-stream", b"X-Status": b"200"}
    assert exchange.bodies == [(b"one", True), (b"two", True), (b"three", False)]


async def test_a_stream_may_end_with_its_first_part():
    exchange = Exchange(connection=Connection(arrived=True))
    await exchange.http.stream([]).end(b"all")
    assert exchange.bodies == [(b"all", False)] and exchange.headers


async def test_several_choices_may_begin_a_stream_at_once():
    exchange = Exchange(connection=Connection(arrived=True))
    stream = exchange.http.stream([])
    await asyncio.gather(*(stream.write(b"%d" % number) for number in range(5)))
    assert [one["type"] for one in exchange.sent].count("http.response.start") == 1
    assert exchange.sent[0]["type"] == "http.response.start"
    assert sorted(exchange.bodies) == [(b"%d" % number, True) for number in range(5)]


def test_a_request_is_aborted_with_its_connection():
    connection = Connection(arrived=True)
    Exchange(connection=connection).http.abort()
    assert connection.calls == ["abort"]


def test_json_may_have_keys_of_any_type():
    response = json_response({1: [None]}, status=404)
    assert (response.status, json.loads(response.body)) == (404, {"1": [None]})
    assert (json_response([]).status, response.media) == (200, "application/json")


@pytest.mark.parametrize(("size", "here"), [(0, True), (8192, True), (8193, False)])
async def test_long_bodies_are_parsed_in_a_thread(size: int, here: bool):
    def work(*args: int, **named: int) -> tuple[bool, Any, Any]:
        return threading.current_thread() is threading.main_thread(), args, named

    assert await off_loop(size, work, 1, a=2) == (here, (1,), {"a": 2})


def test_the_date_is_formatted_once_a_second(monkeypatch: pytest.MonkeyPatch):
    now = 1_000_000_000.2
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: now))
    first = module._date()
    assert first == (b"date", b"Sun, 09 Sep 2001 01:46:40 GMT")
    now += 0.7
    assert module._date() is first
    for step in (0.2, -5.0):  # the clock may be set back
        now += step
        assert module._date() != first

"""Bodies as handlers read them, clients that are refused, and clients that are slow."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest
from virtual_time import in_virtual_time

from engine.protocol import BadRequest, Overloaded, TooLarge
from engine.web import SlowClients, check_input, linger, read_body
from engine.web.connection import LINGER_S


class Messages:
    """An ASGI `receive` of these parts of a body; it counts what was asked for."""

    def __init__(self, *parts: bytes, ends: bool = True) -> None:
        self.messages: list[dict[str, Any]] = [
            {"type": "http.request", "body": part, "more_body": True} for part in parts
        ]
        if ends:
            self.messages[-1]["more_body"] = False
        self.asked = 0

    async def __call__(self) -> Any:
        self.asked += 1
        if not self.messages:
            return {"type": "http.disconnect"}
        return self.messages.pop(0)


def scope(length: bytes | None = None, **state: Any) -> Any:
    headers = [] if length is None else [(b"content-length", length)]
    return {"headers": headers, "state": state}


@pytest.mark.parametrize(
    ("parts", "good"),
    [
        ((b"x" * 10,), True), ((b"x" * 11,), False), ((b"x" * 5, b"", b"x" * 5), True),
        ((b"x" * 5, b"x" * 6), False), ((b"",), True),
    ],
)  # fmt: skip
async def test_a_body_as_long_as_the_limit_is_read(parts, good):
    receive = Messages(*parts)
    if good:
        assert await read_body(scope(), receive, 10) == b"".join(parts)
        return
    with pytest.raises(TooLarge):
        await read_body(scope(), receive, 10)


async def test_a_body_is_refused_as_soon_as_it_is_too_long():
    receive = Messages(b"x" * 8, b"x" * 8, b"x" * 8, ends=False)
    with pytest.raises(TooLarge):
        await read_body(scope(), receive, 10)
    assert receive.asked == 2
    receive = Messages(b"x")
    with pytest.raises(TooLarge, match="has 11 bytes"):
        await read_body(scope(b"11"), receive, 10)
    assert receive.asked == 0  # the client need not send it
    assert await read_body(scope(b"10"), receive, 10) == b"x"
    assert await read_body(scope(b"+99"), Messages(b"x"), 10) == b"x"  # the server's affair


@pytest.mark.parametrize("name", [b"age", b"content-lengths", b"x-length"])
async def test_only_the_length_of_the_body_limits_it(name: bytes):
    other = {"headers": [(name, b"999")], "state": {}}
    assert await read_body(other, Messages(b"x"), 10) == b"x"
    assert await read_body({"headers": []}, Messages(b"x"), 10) == b"x"  # of another server


async def test_a_body_that_breaks_off_is_no_body():
    with pytest.raises(BadRequest, match="disconnected within"):
        await read_body(scope(), Messages(b"{}", ends=False), 10)


@pytest.mark.parametrize(
    ("state", "error"), [({"broken": "odd"}, BadRequest), ({"overloaded": True}, Overloaded)]
)
async def test_what_the_server_found_wrong_is_raised(state, error):
    with pytest.raises(error):
        check_input(state)
    with pytest.raises(error):
        await read_body(scope(**state), Messages(b"x"), 10)
    check_input({})


class Refused:
    """The connection of a refused client."""

    def __init__(self) -> None:
        self.done: list[tuple[str, float]] = []

    def half_close(self) -> None:
        self.done.append(("half closed", asyncio.get_running_loop().time()))

    def abort(self) -> None:
        self.done.append(("aborted", asyncio.get_running_loop().time()))


@pytest.mark.parametrize("pieces", [3, 10**6])
@in_virtual_time
async def test_a_refused_client_may_read_why_for_a_while(pieces: int):
    async def receive() -> Any:
        nonlocal pieces
        pieces -= 1
        await asyncio.sleep(0.1)
        return {"type": "http.request", "body": b"x", "more_body": pieces > 0}

    connection: Any = Refused()
    patient = pieces > 100
    await linger(connection, receive)
    until = LINGER_S if patient else 0.3
    assert connection.done == [("half closed", 0.0), ("aborted", pytest.approx(until))]
    await linger(None, Messages(b"x"))


@in_virtual_time
async def test_a_refused_client_that_sends_for_ever_is_cut_off_after_two_seconds():
    async def receive() -> Any:
        await asyncio.sleep(0.3)
        return {"type": "http.request", "body": b"x", "more_body": True}

    await linger(None, receive)
    assert asyncio.get_running_loop().time() == pytest.approx(2.0)


# Slow clients


class Connection:
    """A connection with `unread` bytes, which owes a head `since` then."""

    def __init__(self, unread: int = 0, since: float | None = None) -> None:
        self.unread, self.waiting_since = unread, since
        self.closing = False
        self.aborted = 0
        self.transport = SimpleNamespace(
            is_closing=lambda: self.closing,
            get_write_buffer_size=lambda: self.unread,
            get_extra_info=lambda name: None,
            abort=self._abort,
        )

    def _abort(self) -> None:
        self.aborted += 1
        self.closing, self.unread = True, 0


def checked(slow: SlowClients, now: float, *connections: Any) -> list[bool]:
    slow.check(connections, now)
    return [bool(connection.aborted) for connection in connections]


def test_a_head_has_its_time_and_no_more():
    dropped: list[str] = []
    slow = SlowClients(dropped.append, head_s=10.0)
    connections = [Connection(since=0.0), Connection(since=0.5), Connection()]
    assert checked(slow, 9.9, *connections) == [False, False, False]
    assert checked(slow, 10.0, *connections) == [True, False, False]
    connections[1].waiting_since = 10.2  # the head has come, and another one begins
    connections[0].closing = True
    assert checked(slow, 20.0, *connections) == [True, False, False]
    assert connections[0].aborted == 1 and dropped == ["no_request"]
    assert checked(slow, math.inf, *connections[1:]) == [True, False]


def test_a_client_that_reads_a_little_stays():
    dropped: list[str] = []
    slow = SlowClients(dropped.append, head_s=1e9, stall_s=10.0)
    reads, grows, stalls, done = Connection(100), Connection(1), Connection(100), Connection(0)
    for now in range(25):
        reads.unread -= 1
        grows.unread += 1
        stalled = checked(slow, float(now), reads, grows, stalls, done)
        assert stalled == [False, False, now >= 10, False]
    assert dropped == ["unread"]
    assert checked(slow, 33.9, reads) == [False]
    reads.closing = True  # it still has something to read
    assert checked(slow, 34.0, reads) == [True]


def test_connections_behind_one_that_closes_are_checked():
    slow = SlowClients(lambda _: None, head_s=10.0)
    closes, owes = Connection(since=0.0), Connection(since=0.0)
    closes.closing = True
    assert checked(slow, 10.0, closes, owes) == [False, True]


def test_a_connection_that_is_gone_is_forgotten():
    slow = SlowClients(lambda _: None, head_s=1e9, stall_s=10.0)
    connection: Any = Connection(100)
    slow.check([connection], 0.0)
    slow.check([], 1.0)
    assert not slow._unread
    assert checked(slow, 11.0, connection) == [False]


@in_virtual_time
async def test_connections_are_checked_some_times_within_the_shorter_limit():
    loop = asyncio.get_running_loop()
    slow, connection, when = SlowClients(lambda _: None, head_s=2.0, stall_s=60.0), Connection(), []
    slow.check = lambda open, now: when.append((now, list(open)))  # type: ignore[assignment]
    watching = asyncio.ensure_future(slow.watch({connection}))
    await asyncio.sleep(1.6)
    watching.cancel()
    assert when == [(pytest.approx(0.5 * n), [connection]) for n in (1, 2, 3)]
    assert loop.time() == pytest.approx(1.6)

"""The bounds of the HTTP server, hit exactly and exceeded by one, on a transport of the tests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState
from virtual_time import in_virtual_time

from engine.protocol import MicroserveError
from engine.web import BodyBudget, BoundedHttpProtocol, check_input
from engine.web.protocol import (
    MAX_FIELD,
    MAX_HEADERS,
    MAX_UNPARSED,
    MAX_WAITING,
    SLICE,
    _check_head,
    _path,
)

HOST = b"Host: x\r\n"
BODY = b"4\r\nabcd\r\n0\r\n\r\n"  # chunked
UPGRADE = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"


class Transport:
    """Notes what is written, and whether the server reads."""

    def __init__(self) -> None:
        self.written = b""
        self.reading = True
        self.closing = self.aborted = self.ended = False

    def write(self, data: bytes) -> None:
        self.written += data

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True


class Server:
    """One connection to an application that answers `METHOD TARGET BODY` once `gate` is open."""

    def __init__(self, budget: BodyBudget | None = None, *, limit: int = 2**20) -> None:
        self.budget = budget or BodyBudget(limit)
        self.gate = asyncio.Event()
        self.gate.set()
        self.rest = asyncio.Event()  # what a request waits for after its answer
        self.rest.set()
        self.headers: list[list[tuple[bytes, bytes]]] = []  # of the requests that were answered
        self.begun = 0
        self.cancelled = 0
        config = Config(
            self._app, http=BoundedHttpProtocol, ws="none", interface="asgi3", lifespan="off",
            log_config=None, access_log=False,
        )  # fmt: skip
        config.load()
        self.transport: Any = Transport()
        self.protocol = BoundedHttpProtocol(config, ServerState(), {}, budget=self.budget)
        self.protocol.connection_made(self.transport)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope["state"]["connection"]
        connection.cancels(asyncio.current_task())
        self.begun += 1
        status, body, more = 200, b"", True
        try:
            await self.gate.wait()
            while more:
                check_input(scope["state"])
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                body += message["body"]
                more = message["more_body"]
            check_input(scope["state"])
        except MicroserveError as error:
            status, body = error.status, error.message.encode()
        except asyncio.CancelledError:
            self.cancelled += 1
            return
        answer = b"%b %b %b" % (scope["method"].encode(), scope["raw_path"], body)
        headers = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})
        self.headers.append(scope["headers"])
        try:
            await self.rest.wait()
        except asyncio.CancelledError:
            self.cancelled += 1

    async def send(self, *data: bytes) -> list[int]:
        """Send bytes; return the statuses of all answers so far."""
        for piece in data:
            self.protocol.data_received(piece)
            await turns()
        return self.statuses

    @property
    def statuses(self) -> list[int]:
        return [int(head[:3]) for head in self.transport.written.split(b"HTTP/1.1 ")[1:]]

    async def end(self) -> None:
        """Lose the connection; nothing may be counted any more."""
        self.gate.set()
        self.protocol.connection_lost(None)
        await turns()
        assert self.budget.used == 0


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def get(*headers: bytes, target: bytes = b"/") -> bytes:
    lines = [b"GET " + target + b" HTTP/1.1", b"Host: x", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def post(length: int) -> bytes:
    return b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % length


# Heads


@pytest.mark.parametrize("method", [b"GET", b"POST"])
@pytest.mark.parametrize(
    ("version", "headers", "good"),
    [
        (b"1.1", b"", True),
        (b"1.0", b"", False),
        (b"1.1", UPGRADE, False),
        (b"1.0", UPGRADE, False),
        (b"1.1", b"Transfer-Encoding: identity\r\n", False),
    ],
    ids=["1.1", "1.0", "upgrade", "1.0 upgrade", "two codings"],
)
async def test_a_valid_chunked_body_needs_http_1_1_and_no_upgrade(method, version, headers, good):
    """Nothing else is wrong with these requests. A proxy might see their end elsewhere."""
    server = Server()
    head = b"%b / HTTP/%b\r\n" % (method, version) + HOST + headers
    hidden = get(target=b"/hidden")
    statuses = await server.send(head + b"Transfer-Encoding: chunked\r\n\r\n" + BODY + hidden)
    if good:
        assert statuses == [200, 200]
        assert b"%b / abcd" % method in server.transport.written
    else:
        assert statuses == [400]
        assert b"transfer coding" in server.transport.written
        assert b"/hidden" not in server.transport.written
        assert server.protocol._discarding
    await server.end()


@pytest.mark.parametrize(
    ("version", "hosts", "good"),
    [("1.1", 1, True), ("1.1", 0, False), ("1.1", 2, False),
     ("1.0", 0, True), ("1.0", 1, True), ("1.0", 2, False),
     ("0.9", 1, False), ("1.2", 1, False), ("2.0", 1, False)],
)  # fmt: skip
def test_versions_and_hosts(version: str, hosts: int, good: bool):
    headers = [(b"host", b"x")] * hosts
    if good:
        _check_head(version, b"/", headers, upgrade=False)
    else:
        with pytest.raises(
            ValueError, match="Host headers" if version in ("1.0", "1.1") else "HTTP/"
        ):
            _check_head(version, b"/", headers, upgrade=False)


@pytest.mark.parametrize("coding", [b"chunked", b"Chunked"])
def test_the_only_coding_is_chunked_and_given_once(coding: bytes):
    host, chunked = (b"host", b"x"), (b"transfer-encoding", coding)
    _check_head("1.1", b"/", [host, chunked], upgrade=False)
    for wrong in ([chunked, chunked], [(b"transfer-encoding", b"gzip, " + coding)]):
        with pytest.raises(ValueError, match="transfer coding"):
            _check_head("1.1", b"/", [host, *wrong], upgrade=False)


async def test_the_number_of_headers_is_bounded():
    for more, status in ((0, 200), (1, 400)):
        server = Server()
        head = get(*[b"a: b"] * (MAX_HEADERS - 1 + more))  # beside Host
        assert await server.send(head) == [status]
        await server.end()


@pytest.mark.parametrize("part", ["header", "target"])
async def test_the_length_of_a_header_and_of_the_target_are_bounded(part: str):
    for more, status in ((0, 200), (1, 400)):
        server = Server()
        length = MAX_FIELD + more
        if part == "header":
            head = get(b"abc: " + b"x" * (length - 3))
        else:
            head = get(target=b"/" + b"x" * (length - 1))
        assert await server.send(head) == [status]
        await server.end()


async def test_what_the_parser_may_take_at_once_is_bounded():
    """In many small headers, or in one field that does not end."""
    fits = [b"a%d: " % n + b"x" * 1000 for n in range((MAX_UNPARSED - SLICE) // 1010)]
    for lines, status in ((fits, 200), (fits * 2, 400)):
        server = Server()
        assert await server.send(get(*lines)) == [status]
        await server.end()
    server = Server()
    assert await server.send(b"GET /", b"x" * MAX_UNPARSED) == []
    assert await server.send(b"x") == [400]
    await server.end()


async def test_heads_and_bodies_do_not_add_up():
    server = Server()
    long = b"a: " + b"x" * 8000
    for _ in range(2):
        await server.send(get(*[long] * 7))
        await server.send(post(50_000) + b"x" * 50_000)
    assert server.statuses == [200] * 4
    chunked = b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n"
    await server.send(chunked + b"\r\n".join([*[long] * 7, b"\r\n"]))
    await server.send(b"4;" + b"x" * 30_000 + BODY[1:])
    assert server.statuses == [200] * 5
    await server.end()


async def test_http_1_0_is_not_told_to_continue():
    for version, told in ((b"1.1", True), (b"1.0", False)):
        server = Server()
        await server.send(
            b"POST / HTTP/%b\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n"
            % version
        )
        assert (b"100 Continue" in server.transport.written) is told
        assert (await server.send(b"x"))[-1] == 200
        await server.end()


@pytest.mark.parametrize("cut", [0, 1, 3])
async def test_an_ignored_upgrade_ends_the_connection_after_its_body(cut: int):
    server = Server()
    whole = post(3).replace(HOST, HOST + UPGRADE) + b"abc" + get(target=b"/hidden")
    at = whole.index(b"abc") + cut
    assert await server.send(whole[:at], whole[at:]) == [200]
    assert b"POST / abc" in server.transport.written
    assert server.transport.closing and b"/hidden" not in server.transport.written
    await server.end()


# Requests behind a running one


async def test_bytes_that_wait_are_bounded():
    server = Server()
    server.gate.clear()
    await server.send(get())
    padding = SLICE - len(get(b"a: "))
    await server.send(get(b"a: " + b"x" * padding) * (MAX_WAITING // SLICE))
    assert server.transport.reading and server.budget.used == MAX_WAITING
    await server.send(b"G")
    assert not server.transport.reading
    server.protocol.flow.resume_reading()  # as uvicorn does for an application that reads a body
    assert not server.transport.reading
    server.gate.set()
    for _ in range(MAX_WAITING // SLICE):
        await turns()
    assert server.statuses == [200] * (1 + MAX_WAITING // SLICE)
    assert server.transport.reading and server.budget.used == 0
    await server.send(get()[1:])
    assert server.statuses == [200] * (2 + MAX_WAITING // SLICE)
    await server.end()


async def test_waiting_bytes_over_the_budget_are_refused_in_turn():
    for more, statuses in ((0, [200, 200]), (1, [200, 503])):
        behind = get(target=b"/" + b"x" * 99)
        server = Server(limit=len(behind) - more)
        server.gate.clear()
        await server.send(get())
        await server.send(behind[:50], behind[50:])
        assert server.begun == 1
        assert server.budget.used == (0 if more else len(behind))
        server.gate.set()
        await turns()
        assert server.statuses == statuses
        await server.end()


async def test_the_next_request_begins_once_the_response_was_read(caplog):
    server = Server()
    server.protocol.pause_writing()  # as a transport whose buffer is full
    server.gate.clear()
    await server.send(get() + get())
    server.protocol.resume_writing()
    server.gate.set()
    server.protocol.flow.write_paused = True  # the response fills the buffer
    server.protocol.flow._is_writable_event.set()
    await turns()
    assert (server.begun, server.statuses) == (1, [200])
    for _ in range(2):
        server.protocol.resume_writing()
    await turns()
    assert (server.begun, server.statuses) == (2, [200, 200])
    assert await server.send(get()) == [200, 200, 200]
    assert not caplog.records
    await server.end()


# Bodies


async def test_a_body_as_large_as_the_budget_is_received():
    for more, status in ((0, 200), (1, 503)):
        server = Server(limit=1000 - more)
        server.gate.clear()
        await server.send(post(1000), b"x" * 600, b"x" * 400)
        assert server.budget.used == (0 if more else 1000)
        server.gate.set()
        await turns()
        assert server.statuses == [status]
        assert server.budget.used == 0
        assert server.transport.closing is bool(more)
        await server.end()


@pytest.mark.parametrize("running", [False, True])
async def test_a_connection_that_is_lost_gives_back_what_it_holds(running: bool):
    server = Server()
    server.gate.clear()
    await server.send(post(10) + b"x" * (10 if running else 4))
    if running:
        await server.send(post(100) + b"x" * 50)
    assert server.budget.used > 0
    server.protocol.connection_lost(None)
    assert server.budget.used == 0 and server.protocol.gone
    await turns()
    assert (server.begun, server.cancelled, server.statuses) == (1, 1, [])


async def test_a_request_that_was_answered_is_not_cancelled():
    """Also if the next request has just begun."""
    for behind in (b"", get()):
        server = Server()
        server.rest.clear()
        assert await server.send(get()) == [200]
        if behind:
            server.protocol.data_received(behind)
        server.protocol.connection_lost(None)
        await turns()
        assert server.cancelled == 0
        server.rest.set()
        await turns()


async def test_trailers_are_no_headers():
    server = Server()
    head = b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    assert await server.send(head + b"0\r\nX-Late: 1\r\n\r\n" + get(b"x-own: 2")) == [200, 200]
    chunked, own = ([name for name, _ in headers] for headers in server.headers)
    assert chunked == [b"host", b"transfer-encoding"]
    assert own == [b"host", b"x-own"]
    await server.end()


# The connection's end


async def test_shutdown_closes_after_the_running_response():
    server = Server()
    server.gate.clear()
    await server.send(get() + get())
    server.protocol.shutdown()
    assert not server.transport.closing
    server.gate.set()
    await turns()
    assert (server.begun, server.statuses) == (1, [200])
    assert server.transport.closing
    await server.end()
    idle = Server()
    idle.protocol.shutdown()
    assert idle.transport.closing


async def test_after_a_half_close_input_is_dropped():
    server = Server()
    server.gate.clear()
    await server.send(post(100) + b"x" * 50)
    server.protocol.half_close()
    assert server.transport.ended and server.budget.used == 0
    await server.send(b"x" * 50)
    assert server.budget.used == 0
    server.transport.can_write_eof = lambda: False  # TLS
    server.transport.ended = False
    server.protocol.half_close()
    assert not server.transport.ended
    await server.end()


async def test_an_abort_ends_the_request():
    server = Server()
    server.gate.clear()
    await server.send(post(100) + b"x" * 50)
    server.protocol.abort()
    assert server.transport.aborted and server.protocol.gone
    server.gate.set()
    await turns()
    assert server.statuses == []
    await server.end()


async def test_when_a_connection_owes_a_head():
    loop, server = asyncio.get_running_loop(), Server()
    opened = server.protocol.waiting_since
    assert opened is not None and opened <= loop.time()
    await server.send(b"GET / HTTP")
    assert server.protocol.waiting_since is not None
    server.gate.clear()
    await server.send(b"/1.1\r\n" + HOST + b"\r\n")
    assert server.protocol.waiting_since is None
    server.gate.set()
    await turns()
    assert server.protocol.waiting_since is None  # idle connections have another limit
    await server.send(b"\r\n")
    assert server.protocol.waiting_since is not None
    await server.end()


def test_a_budget_is_taken_whole_or_not_at_all():
    budget = BodyBudget(10)
    assert [budget.take(4), budget.take(6), budget.take(1)] == [True, True, False]
    assert budget.used == 10
    budget.give(1)
    assert [budget.take(2), budget.take(1)] == [False, True]
    assert budget.used == 10


# Figures that the documentation names


def test_the_bounds_are_those_of_the_documentation():
    assert (MAX_HEADERS, MAX_FIELD) == (128, 8190)
    assert MAX_UNPARSED == MAX_WAITING == 64 << 10


async def test_few_of_many_pipelined_requests_are_parsed_before_the_first_is_answered():
    server = Server()
    server.gate.clear()
    await server.send(get() * 1000)
    assert len(server.protocol._cycles) == 4096 // len(get())
    server.gate.set()
    for _ in range(1000):
        await turns()
    assert server.statuses == [200] * 1000
    await server.end()


@in_virtual_time
async def test_an_idle_connection_is_closed_after_75_seconds():
    server = Server()
    for _ in range(2):
        await server.send(get())
        await asyncio.sleep(74.0)
        assert not server.transport.closing
    await asyncio.sleep(1.5)
    assert server.transport.closing
    await server.end()


# What else a connection counts and forgets


async def test_after_the_connection_is_lost_nothing_is_given_back_twice():
    server = Server()
    server.gate.clear()
    await server.send(post(10) + b"x" * 10)
    assert server.protocol.arrived and server.budget.used == 10
    server.protocol.connection_lost(ConnectionResetError())
    server.protocol.release_body()  # by a handler that has just parsed it
    assert server.budget.used == 0
    await turns()


async def test_a_lost_idle_connection_has_no_timer():
    server = Server()
    await server.send(get())
    assert server.protocol.timeout_keep_alive_task is not None
    server.protocol.connection_lost(ConnectionResetError())
    assert server.protocol.timeout_keep_alive_task is None


async def test_shutdown_closes_at_once_if_only_the_client_has_still_to_read():
    server = Server()
    server.gate.clear()
    await server.send(get() + get())
    server.gate.set()
    server.protocol.flow.write_paused = True  # the response fills the buffer
    await turns()
    assert server.statuses == [200] and not server.transport.closing
    server.protocol.shutdown()
    assert server.transport.closing
    server.protocol.resume_writing()
    await turns()
    assert (server.begun, server.statuses) == (1, [200])
    await server.end()


async def test_a_body_that_nobody_reads_stops_the_reading():
    for size, reading in ((65536, True), (65537, False)):
        server = Server()
        server.gate.clear()
        await server.send(get() + post(100_000) + b"x" * size)
        assert server.transport.reading is reading
        server.gate.set()
        await server.send(b"x" * (100_000 - size))
        assert server.statuses == [200, 200] and server.transport.reading
        await server.end()


async def test_a_head_behind_a_running_request_has_no_time_limit_yet():
    server = Server()
    server.gate.clear()
    await server.send(get() + b"GET / HTTP")
    assert server.protocol.waiting_since is None
    assert server.transport.reading  # a disconnect is noticed
    server.gate.set()
    await turns()
    assert await server.send(b"/1.1\r\n" + HOST + b"\r\n") == [200, 200]
    await server.end()


async def test_a_refused_body_behind_a_running_request_gives_back_its_own_bytes():
    server = Server(limit=100)
    server.gate.clear()
    await server.send(post(10) + b"x" * 10 + post(200) + b"x" * 60)
    assert server.budget.used == 70
    await server.send(b"x" * 50)
    assert server.budget.used == 10 and server.protocol._discarding
    server.gate.set()
    await turns()
    assert server.statuses == [200, 503]
    await server.end()


async def test_an_upgrade_with_a_long_head_is_ignored_too():
    server = Server()
    long = b"".join(b"A%d: %b\r\n" % (number, b"x" * 1000) for number in range(6))
    await server.send(post(3).replace(HOST, HOST + UPGRADE + long) + b"abc" + get())
    assert server.statuses == [200] and b"POST / abc" in server.transport.written
    await server.end()


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"*", b"/"), (b"http://h", b"/"), (b"http://h/", b"/"), (b"http://h:80/p/q", b"/p/q"),
        (b"http://h/p?q=1", b"/p?q=1"), (b"http://h?q", b"/?q"),
    ],
)  # fmt: skip
def test_a_whole_url_as_target_is_its_path_and_query(target: bytes, path: bytes):
    assert _path(target) == path


async def test_a_response_to_http_1_0_has_no_chunks():
    """Its end is the end of the connection."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"one", b"", b"two"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body"})

    for version, body in ((b"1.0", b"onetwo"), (b"1.1", b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")):
        server = Server()
        server.protocol.app = app
        await server.send(b"GET / HTTP/%b\r\n" % version + HOST + b"\r\n")
        assert server.transport.written.partition(b"\r\n\r\n")[2] == body
        assert server.transport.closing is (version == b"1.0")
        await server.end()


async def test_empty_lines_between_requests_are_bounded():
    server = Server()
    await server.send(get())
    assert await server.send(b"\r\n" * (MAX_UNPARSED // 2)) == [200]
    assert await server.send(b"\r") == [200, 400]
    await server.end()

"""An engine's HTTP client byte by byte, without sockets; its connections in virtual time."""

from __future__ import annotations

import asyncio
import errno
import ssl
from typing import Any

import pytest
from virtual_time import in_virtual_time

from router.base.errors import EngineUnreachable, NobodyListens, OutOfFiles
from router.engines import http_client as module
from router.engines.http_client import HEAD_S, KEEPALIVE_S, HttpClient, Reply, _Connection

URL = "http://engine:1"
AGES = (9.0, KEEPALIVE_S + 0.01, KEEPALIVE_S, 1.0, 0.5)  # of idle connections (s)


class Transport:
    """The other end of a connection that was made."""

    def __init__(self) -> None:
        self.sent = b""
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted


def connected(client: HttpClient | None = None) -> tuple[Any, Transport]:
    transport: Any = Transport()
    connection = _Connection(client or HttpClient(URL))
    connection.connection_made(transport)
    return connection, transport


def reply(body: bytes = b"", status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def streaming(*pieces: bytes) -> bytes:
    """Return a head without an end of its body, and these pieces."""
    chunks = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(chunks)


class Client(HttpClient):
    """A client whose connections answer with `script`, one item for each call."""

    def __init__(self, *script: bytes, url: str = URL, **options: Any) -> None:
        super().__init__(url, **options)
        self.script = list(script)
        self.made: list[Transport] = []

    async def _connect(self) -> Any:
        connection, transport = connected(self)
        self.made.append(transport)
        transport.abort = lambda: self._lost(connection, transport)  # type: ignore[method-assign]
        transport.write = lambda data: self._answer(  # type: ignore[method-assign]
            connection, transport, data
        )
        return connection

    def _answer(self, connection: Any, transport: Transport, data: bytes) -> None:
        transport.sent += data
        if self.script and (answer := self.script.pop(0)):
            asyncio.get_running_loop().call_soon(connection.data_received, answer)

    def _lost(self, connection: Any, transport: Transport) -> None:
        if not transport.aborted:
            transport.aborted = True
            asyncio.get_running_loop().call_soon(connection.connection_lost, None)


# Replies


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_a_reply_is_whole_however_it_arrives(size):
    connection, transport = connected()
    data = reply(b"0123456789", "429 Full", "X-A: 1", "RETRY-After: 7", "X-B: 2", "A: 3")
    answer = connection.send(b"ask", 10)
    assert transport.sent == b"ask" and not connection.reusable
    for at in range(0, len(data), size):
        assert not answer.done()
        connection.data_received(data[at : at + size])
    got = answer.result()
    assert got == Reply(429, "7", b"0123456789") and type(got.body) is bytes
    assert connection.reusable and not transport.aborted
    again = connection.send(b"", 10)  # nothing is left of the reply before
    connection.data_received(reply())
    assert again.result() == Reply(200, None, b"")


@pytest.mark.parametrize("pieces", [[10], [4, 6], [3, 3, 4]])
async def test_a_body_is_bounded(pieces):
    for more in (0, 1):
        connection, transport = connected()
        answer = connection.send(b"", 10)
        sizes = [*pieces[:-1], pieces[-1] + more]
        for data in (streaming(), *(b"%x\r\n" % size + b"x" * size + b"\r\n" for size in sizes)):
            connection.data_received(data)
        connection.data_received(b"0\r\n\r\n")
        if more:
            with pytest.raises(EngineUnreachable, match="engine:1: a reply of more than 10 bytes"):
                answer.result()
        else:
            assert answer.result().body == b"x" * 10
        assert transport.aborted is bool(more)


@pytest.mark.parametrize("before", ["nothing", "a reply", "a body"])
async def test_what_is_no_body_is_bounded(monkeypatch, before):
    monkeypatch.setattr(module, "MOST_HEAD", 200)
    for more in (0, 1):
        connection, transport = connected()
        answer = connection.send(b"", 10)
        left = 200 + more
        if before == "a reply":  # each has its own bound
            connection.data_received(reply())
            answer = connection.send(b"", 10)
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"
        if before == "a body":  # and so has what follows a body
            connection.data_received(head + b"\r\n")
            connection.data_received(b"1\r\nx")
            rest = b"\r\n0\r\nX: "
        else:
            rest = head + b"X: "
        connection.data_received(rest)
        connection.data_received(b"y" * (left - len(rest)))
        assert transport.aborted is bool(more)
        if more:
            with pytest.raises(EngineUnreachable, match="more than 200 bytes of heads"):
                answer.result()
        else:
            assert not answer.done()


async def test_bodies_and_replies_are_not_counted_as_heads(monkeypatch):
    monkeypatch.setattr(module, "MOST_HEAD", 200)
    connection, transport = connected()
    for _ in range(20):
        answer = connection.send(b"", 1000)
        connection.data_received(reply(b"x" * 500))
        assert len(answer.result().body) == 500
        answer = connection.send(b"", 1000)
        connection.data_received(reply())
        assert answer.done()
    assert not transport.aborted


async def test_what_is_no_http_or_was_not_asked_for_ends_the_connection():
    connection, transport = connected()
    answer = connection.send(b"", 10)
    connection.data_received(b"SSH-2.0\r\n")
    with pytest.raises(EngineUnreachable, match="engine:1: no HTTP"):
        answer.result()
    assert transport.aborted
    connection, transport = connected()
    connection.data_received(b"H")  # the next call would take it for its reply
    assert transport.aborted and not connection.reusable


async def test_a_server_that_closes_after_a_reply_is_not_asked_again():
    connection, transport = connected()
    answer = connection.send(b"", 10)
    connection.data_received(reply(b"x", "200 OK", "Connection: close"))
    assert answer.result().body == b"x"
    assert transport.aborted and not connection.reusable


@pytest.mark.parametrize(
    ("error", "why"),
    [(None, "it closed the connection"), (ConnectionResetError("reset"), "reset")],
)
async def test_a_lost_connection_fails_its_call(error, why):
    client = HttpClient(URL)
    connection, _ = connected(client)
    assert client._open == {connection}
    answer = connection.send(b"", 10)
    connection.data_received(reply(b"xy")[:-1])
    connection.connection_lost(error)
    with pytest.raises(EngineUnreachable, match=f"^{URL}: {why}$"):
        answer.result()
    assert not client._open and not connection._body
    connection.connection_lost(error)  # nobody waits: nothing happens


async def test_a_reply_to_a_cancelled_call_is_dropped():
    for data in (reply(b"x"), b"no HTTP"):
        connection, _ = connected()
        connection.send(b"", 10).cancel()
        connection.data_received(data)
    connection, _ = connected()
    connection.close()
    _Connection(HttpClient(URL)).close()  # it was never made


# Streams


async def stream(first: bytes) -> tuple[Any, Transport, list[Any], Any]:
    """Return a connection that listens to a stream, and what was said: bytes and losses."""
    said: list[Any] = []
    connection, transport = connected()
    connection.sink, connection.lost = said.append, said.append
    head = connection.send(b"", 10)
    connection.data_received(first)
    assert head.done()
    return connection, transport, said, head


async def test_a_streams_reply_is_its_head():
    connection, transport, said, head = await stream(streaming())
    assert head.result() == Reply(200, None, b"")
    for piece in (b"x" * 100, b"y"):  # no bound on their sum
        connection.data_received(b"%x\r\n%b\r\n" % (len(piece), piece))
    assert said == [b"x" * 100, b"y"] and not transport.aborted


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("end", "the stream ended"), ("loss", "it closed the connection"),
        ("no HTTP", "no HTTP"),
    ],
)  # fmt: skip
async def test_the_end_of_a_stream_is_told_once(how, why):
    connection, transport, said, _ = await stream(streaming(b"x"))
    if how == "end":
        connection.data_received(b"0\r\n\r\n")
    elif how == "no HTTP":
        connection.data_received(b"\0")
    connection.connection_lost(None)
    assert said[0] == b"x" and len(said) == 2
    assert isinstance(said[1], EngineUnreachable) and why in str(said[1])
    assert transport.aborted


async def test_a_stream_that_was_closed_tells_nothing():
    connection, transport, said, _ = await stream(streaming())
    connection.close()
    connection.connection_lost(None)
    assert not said and transport.aborted


async def test_a_stream_that_is_refused_has_a_reply():
    said: list[Any] = []
    connection, _ = connected()
    connection.sink, connection.lost = said.append, said.append
    answer = connection.send(b"", 10)
    data = reply(b"none", "404 Not Found")
    connection.data_received(data[:-1])
    assert not answer.done()
    connection.data_received(data[-1:])
    assert answer.result() == Reply(404, None, b"none") and not said


async def test_a_lost_head_fails_the_call_and_not_the_stream():
    said: list[Any] = []
    connection, _ = connected()
    connection.lost = said.append
    answer = connection.send(b"", 10)
    connection.connection_lost(None)
    with pytest.raises(EngineUnreachable):
        answer.result()
    assert not said


@in_virtual_time
async def test_a_stream_opens_in_time_or_its_connection_is_closed():
    loop, said = asyncio.get_running_loop(), []
    client = Client(b"", streaming(b"x"), reply(b"no", "404 Not Found"), b"")
    with pytest.raises(EngineUnreachable, match="no stream within 10 s"):
        await client.listen("/s", said.append, said.append)
    assert (loop.time(), HEAD_S) == (10.0, 10.0)
    got, close = await client.listen("/s", said.append, said.append)
    assert (got.status, said) == (200, [b"x"])
    refused, _ = await client.listen("/s", said.append, said.append)
    assert (refused.status, refused.body) == (404, b"no")
    opening = asyncio.ensure_future(client.listen("/s", said.append, said.append))
    await asyncio.sleep(1.0)
    opening.cancel()
    await asyncio.wait([opening])
    assert [made.aborted for made in client.made] == [True, False, True, True]
    assert client.made[0].sent.startswith(b"GET /s HTTP/1.1\r\n")
    close()
    await asyncio.sleep(0.01)
    assert client.made[1].aborted and said == [b"x"] and not client._open


# Calls


@in_virtual_time
async def test_a_sink_takes_the_body_of_a_good_reply_only():
    taken: list[bytes] = []
    client = Client(reply(b"x" * 50), reply(b"no", "500 No"), reply(b"y"))
    assert await client.call("GET", "/", sink=taken.append, most=5) == Reply(200, None, b"")
    assert taken == [b"x" * 50]
    assert (await client.call("GET", "/", sink=taken.append)).body == b"no"
    assert (await client.call("GET", "/")).body == b"y"  # it has no sink
    assert len(taken) == len(client.made) == 1


@in_virtual_time
async def test_a_reply_has_16_mib_unless_the_caller_sets_another_limit():
    most = 16 << 20
    client = Client(reply(b"x" * most), reply(b"x" * (most + 1)))
    assert len((await client.call("GET", "/")).body) == most
    with pytest.raises(EngineUnreachable, match=f"more than {most} bytes"):
        await client.call("GET", "/")


@in_virtual_time
async def test_a_request_on_the_wire():
    client = Client(reply(), reply(), url="http://engine:1/base/", api_key="key")
    await client.call("POST", "/x", b"{}", {"X-Request-Id": "a"})
    assert client.made[0].sent == (
        b"POST /base/x HTTP/1.1\r\nHost: engine:1\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer key\r\nX-Request-Id: a\r\nContent-Length: 2\r\n\r\n{}"
    )
    assert client.url == "http://engine:1/base"
    client = Client(reply())
    await client.call("GET", "/x")
    assert b"Authorization" not in client.made[0].sent
    for name, value in (("A", "x\nB: y"), ("A\n", "x")):
        with pytest.raises(ValueError, match="line break"):
            await client.call("GET", "/x", b"", {name: value, "C": "z"})


@in_virtual_time
async def test_only_so_many_idle_connections_are_kept():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_IDLE", 2)
        client = Client(*[reply()] * 4)
        await asyncio.gather(*(client.call("GET", "/") for _ in range(4)))
        assert [made.aborted for made in client.made] == [False, False, True, True]
        assert len(client._idle) == 2


@in_virtual_time
async def test_a_connection_that_the_server_closes_is_not_kept():
    client = Client(reply(b"", "200 OK", "Connection: close"), reply())
    await client.call("GET", "/")
    assert not client._idle
    await client.call("GET", "/")
    assert len(client.made) == 2


@in_virtual_time
async def test_a_retired_client_closes_each_connection_with_its_call():
    client = Client(reply(), b"", reply())
    await client.call("GET", "/")
    asking = asyncio.ensure_future(client.call("GET", "/"))
    await asyncio.sleep(1.0)
    idle = Client(reply())
    await idle.call("GET", "/")
    idle.retire()
    client.retire()
    assert idle.made[0].aborted and not idle._idle
    assert not client.made[0].aborted  # its call goes on
    (connection,) = client._open
    connection.data_received(reply(b"late"))
    assert (await asking).body == b"late"
    assert client.made[0].aborted
    assert (await client.call("GET", "/")).status == 200  # a further call has its own
    assert [made.aborted for made in client.made] == [True, True]


@in_virtual_time
async def test_a_closed_client_fails_its_calls():
    client = Client(b"", b"")
    asking = [asyncio.ensure_future(client.call("GET", "/")) for _ in range(2)]
    await asyncio.sleep(1.0)
    client.close()
    for call in asking:
        with pytest.raises(EngineUnreachable, match="closed the connection"):
            await call
    assert not client._open


@in_virtual_time
async def test_idle_connections_are_used_for_a_while_the_latest_first():
    client, loop = HttpClient(URL), asyncio.get_running_loop()
    await asyncio.sleep(100.0)
    idle = [connected(client) for _ in range(5)]
    for (connection, _), age in zip(idle, AGES, strict=True):
        connection.idle_since = loop.time() - age
        client._idle.append(connection)
    idle[4][1].aborted = True  # the server has closed it
    assert client._reuse() is idle[3][0]
    assert [transport.aborted for _, transport in idle] == [True, True, False, False, True]
    assert client._reuse() is idle[2][0]  # kept for exactly that long
    assert client._reuse() is None
    connection, transport = idle[3]
    connection.idle_since = loop.time()
    client._idle.append(connection)
    await asyncio.sleep(KEEPALIVE_S + 0.01)
    assert client._reuse() is None and transport.aborted


# Connecting


class Network:
    """Notes where connections are opened. `does` is awaited first, and may raise."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.opened: list[tuple[str, int, Any]] = []
        self.error: Exception | None = None
        patch.setattr(asyncio.get_running_loop(), "create_connection", self._open)

    async def _open(self, factory: Any, host: str, port: int, *, ssl: Any) -> Any:
        self.opened.append((host, port, ssl))
        if self.error is not None:
            raise self.error
        connection = factory()
        connection.connection_made(Transport())
        return None, connection


async def test_where_a_client_connects(monkeypatch):
    network = Network(monkeypatch)
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for url in ("http://e:7/x", "http://e", "https://e:7", "https://e"):
        await HttpClient(url, tls=own)._connect()
    assert network.opened == [("e", 7, None), ("e", 80, None), ("e", 7, own), ("e", 443, own)]
    await HttpClient("https://e")._connect()
    (*_, (_, _, default)) = network.opened
    assert default is not own and default.verify_mode is ssl.CERT_REQUIRED
    assert default.check_hostname


@pytest.mark.parametrize(
    ("error", "kind", "why"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), NobodyListens, "engine:1: .*ref"),
        (OSError(errno.EHOSTUNREACH, "no route"), NobodyListens, "no route"),
        (OSError(errno.EMFILE, "too many"), OutOfFiles, "no further connection .*too many"),
        (OSError(errno.ENFILE, "too many"), OutOfFiles, "no further connection .*too many"),
        (ValueError("no name"), EngineUnreachable, "engine:1: no name"),
    ],
    ids=["refused", "no route", "files", "files of all", "name"],
)
async def test_why_no_connection_was_made(monkeypatch, error, kind, why):
    Network(monkeypatch).error = error
    with pytest.raises(kind, match=why) as failed:
        await HttpClient(URL).call("GET", "/")
    assert type(failed.value) is kind
    if kind is OutOfFiles:
        assert failed.value.retry_after_s == 0.1  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", [None, 7.0])
@in_virtual_time
async def test_connecting_has_a_time_limit(given):
    loop = asyncio.get_running_loop()
    with pytest.MonkeyPatch.context() as patch:
        network = Network(patch)
        patch.setattr(loop, "create_connection", lambda *args, **kwargs: asyncio.Event().wait())
        client = HttpClient(URL) if given is None else HttpClient(URL, connect_timeout_s=given)
        with pytest.raises(EngineUnreachable, match=f"no connection within {given or 2:g} s"):
            await client.call("GET", "/")
    assert loop.time() == (given or 2.0) and not network.opened

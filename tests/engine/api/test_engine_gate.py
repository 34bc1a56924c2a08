"""What an engine refuses before a handler runs: keys, web pages of other sites, bytes."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from engine_process import EngineProcess
from starlette.types import Message, Receive, Scope, Send
from virtual_time import in_virtual_time

from engine.api import gate
from engine.api.gate import Gate
from engine.protocol import EngineConfig


async def reached(scope: Scope, receive: Receive, send: Send) -> None:
    """Stand for the routes."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


async def call(
    method: str,
    path: str,
    headers: dict[str, str] | None = None,
    *,
    state: dict[str, Any] | None = None,
    **config: Any,
) -> tuple[int, str | None]:
    """Send a request to a gate; return the status and the error's type."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    given = {"host": "127.0.0.1:8100", **(headers or {})}
    raw = [(name.encode(), value.encode("latin-1")) for name, value in given.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": raw, "state": state or {}}
    await Gate(reached, EngineConfig(**config))(scope, receive, send)
    body = json.loads(sent[1]["body"])
    return sent[0]["status"], body["error"]["type"] if body else None


async def test_a_connection_beyond_the_limit_gets_probes_only():
    closed: list[str] = []
    crowded = {"crowded": True, "connection": SimpleNamespace(
        shutdown=lambda: closed.append("closed"), arrived=True, gone=False
    )}  # fmt: skip
    for path, status in (("/health", 200), ("/microserving/state", 503)):
        assert (await call("GET", path, state=crowded))[0] == status
    assert closed == ["closed", "closed"]


OK, KEY, NO = (200, None), (401, "unauthorized"), (403, "forbidden")


@pytest.mark.parametrize("path", ["/health", "/metrics", "/docs", "/microserving/state", "/"])
async def test_a_key_opens_all_paths_and_no_key_only_health_and_metrics(path: str):
    bearer = {"authorization": "Bearer k"}
    assert await call("GET", path, bearer, api_key="k") == OK
    expected = OK if path in ("/health", "/metrics") else KEY
    for wrong in ({}, {"authorization": "Bearer K"}, {"authorization": "Bearer \xe9"}):
        assert await call("GET", path, wrong, api_key="k") == expected


def basic(key: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"anybody:{key}".encode()).decode()}


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json", "/docs/swagger-ui.css"])
async def test_browsers_send_the_key_for_the_documentation_as_a_password(path: str):
    assert await call("GET", path, basic("k:k"), api_key="k:k") == OK
    spoilt = {"authorization": basic("k:k")["authorization"].replace("Basic ", "Basic *")}
    for wrong in (basic("k"), {}, spoilt, {"authorization": "Basic é"}, {"authorization": "Basic"}):
        assert await call("GET", path, wrong, api_key="k:k") == KEY
    # A browser sends a password by itself, so it opens nothing that does anything.
    for other in ("/microserving/state", "/docsx", "/"):
        assert await call("GET", other, basic("k"), api_key="k") == KEY


@pytest.mark.processes
@pytest.mark.slow
def test_a_browser_is_asked_for_the_key_of_the_documentation():
    engine = EngineProcess(model="mock", MICROSERVE_ENGINE_API_KEY="k")
    try:
        reply = engine.http.get("/docs")
        assert reply.status_code == 401
        assert reply.headers["WWW-Authenticate"].startswith("Basic ")
        assert engine.http.get("/docs", auth=("", "k")).status_code == 200
        reply = engine.http.get("/microserving/state", auth=("", "k"))
        assert (reply.status_code, reply.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert engine.http.get("/metrics").status_code == 200
    finally:
        engine.kill()


@pytest.mark.parametrize(
    "path",
    [
        "//health",
        "/health/",
        "/Health",
        "/health?",
        "/docs/../health",
        "/admin/../health",
        "health",
    ],
)
async def test_no_other_spelling_is_open(path: str):
    assert await call("GET", path, api_key="k") == KEY


@pytest.mark.parametrize("host", ["x/health?", "x/health#", "x:1/health", "/health", "health"])
async def test_the_host_does_not_change_the_path(host: str):
    assert await call("GET", "/microserving/state", {"host": host}, api_key="k") == KEY


async def test_web_pages_of_other_sites_call_nothing_without_a_key():
    for foreign in (
        {"origin": "http://127.0.0.1:3000"},
        {"origin": "null"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site"},
    ):
        for method, path in (
            ("POST", "/microserving/release"),
            ("POST", "/v1/completions"),
            ("GET", "/microserving/stream"),
            ("DELETE", "/metrics"),
        ):
            assert await call(method, path, foreign) == NO, (foreign, path)
            with_key = {**foreign, "host": "x.y", "authorization": "Bearer k"}
            assert await call(method, path, with_key, api_key="k") == OK
        for path in ("/health", "/metrics", "/docs"):
            assert await call("GET", path, foreign) == OK
    own = {"origin": "http://127.0.0.1:8100"}
    assert await call("POST", "/microserving/release", own) == OK


async def test_only_allowed_hosts_without_a_key():
    path = "/microserving/state"
    for host in ("localhost:1", "[::1]:1", "10.0.0.1"):
        assert await call("GET", path, {"host": host}) == OK
    evil = {"host": "evil.example:8100"}
    assert await call("GET", path, evil) == NO
    assert await call("GET", "/health", evil) == OK
    assert await call("GET", path, evil, allowed_hosts="evil.example") == OK
    assert await call("GET", path, evil, advertise="http://evil.example:1") == OK
    bearer = {"authorization": "Bearer k"}
    assert await call("GET", path, {**evil, **bearer}, api_key="k") == OK
    assert await call("GET", path, {**evil, **bearer}, api_key="k", allowed_hosts="a") == NO


class Connection:
    """A connection whose client sends a body slowly."""

    arrived = False
    gone = False

    def __init__(self) -> None:
        self.ended: list[str] = []

    def half_close(self) -> None:
        self.ended.append("half_close")

    def abort(self) -> None:
        self.ended.append("abort")


async def test_a_body_that_does_not_come_in_time_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gate, "BODY_TIMEOUT_S", 0.01)
    monkeypatch.setattr("engine.web.connection.LINGER_S", 0.01)
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    connection = Connection()
    scope = {"type": "http", "method": "POST", "path": "/x", "headers": []}
    scope["state"] = {"connection": connection}
    await Gate(reached, EngineConfig())(scope, receive, send)
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]
    assert connection.ended == ["half_close", "abort"]


class Arrives(Connection):
    """A connection whose client sends a body in these parts, and notes what it receives."""

    def __init__(self, *parts: bytes, arrived: bool = False, gone: bool = False) -> None:
        super().__init__()
        self.arrived, self.gone = arrived, gone
        self.sent: list[Message] = []
        self._parts = list(parts)

    async def receive(self) -> Message:
        if not self._parts:
            return {"type": "http.disconnect"}
        part = self._parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(self._parts)}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def ask(
        self,
        path: str,
        *headers: tuple[bytes, bytes],
        app: Any = reached,
        state: dict[str, Any] | None = None,
        **config: Any,
    ) -> int:
        """Send a request; return the status, 0 without an answer."""
        raw = [(b"host", b"127.0.0.1"), *headers]
        scope = {"type": "http", "method": "POST", "path": path, "headers": raw}
        scope["state"] = {"connection": self, **(state or {})}
        await Gate(app, EngineConfig(**config))(scope, self.receive, self.send)
        return self.sent[0]["status"] if self.sent else 0


@pytest.mark.parametrize(
    ("path", "most"), [("/health", 65536), ("/metrics", 65536), ("/x", 1 << 20)]
)
async def test_bodies_are_limited_and_where_no_key_is_needed_more_so(path: str, most: int):
    assert await Arrives(b"x" * most).ask(path, max_body_mb=1) == 200
    large = Arrives(b"x" * most, b"x", b"never read")
    assert await large.ask(path, max_body_mb=1) == 413
    assert (b"connection", b"close") in large.sent[0]["headers"]
    assert [one["more_body"] for one in large.sent[1:]] == [True, False]
    assert large.ended == ["half_close", "abort"]


async def test_a_body_is_read_before_the_handler_runs():
    received: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        received.extend([await receive(), await receive()])

    client = Arrives(b"ab", b"cd")
    await client.ask("/x", app=app)
    whole = {"type": "http.request", "body": b"abcd", "more_body": False}
    assert received == [whole, {"type": "http.disconnect"}]
    received.clear()
    await Arrives(b"ab", b"cd", arrived=True).ask("/x", app=app)
    assert [one["body"] for one in received] == [b"ab", b"cd"]  # it is in memory already


async def test_a_refused_client_whose_body_has_arrived_keeps_its_connection():
    client = Arrives(arrived=True)
    assert await client.ask("/x", api_key="k") == 401
    assert b"connection" not in dict(client.sent[0]["headers"]) and not client.ended


async def test_a_client_that_has_left_gets_no_refusal():
    assert await Arrives(gone=True).ask("/x", api_key="k") == 0


@pytest.mark.parametrize(
    ("path", "asked"),
    [("/docs", b'Basic realm="microserve engine"'), ("/docs/x", b'Basic realm="microserve engine"'),
     ("/microserving/state", b"Bearer"), ("/docsx", b"Bearer")],
)  # fmt: skip
async def test_a_client_is_told_which_key_is_asked_for(path: str, asked: bytes):
    client = Arrives(arrived=True)
    assert await client.ask(path, api_key="k") == 401
    assert dict(client.sent[0]["headers"])[b"www-authenticate"] == asked
    client = Arrives(arrived=True)
    assert await client.ask(path, (b"host", b"x"), (b"sec-fetch-site", b"cross-site")) == 403
    assert b"www-authenticate" not in dict(client.sent[0]["headers"])


async def test_the_first_of_several_keys_counts():
    right, wrong = ((b"authorization", b"Bearer " + key) for key in (b"k", b"x"))
    assert await Arrives(arrived=True).ask("/x", right, wrong, api_key="k") == 200
    assert await Arrives(arrived=True).ask("/x", wrong, right, api_key="k") == 401


async def test_what_the_server_found_wrong_is_refused():
    for state, status in (({"broken": "odd"}, 400), ({"overloaded": True}, 503)):
        assert await Arrives(arrived=True).ask("/health", state=state) == status


async def test_a_request_without_a_connection_is_served_and_refused():
    """As by another server than ours."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/x", "headers": []}
    for config, status in ((EngineConfig(), 200), (EngineConfig(api_key="k"), 401)):
        sent.clear()
        await Gate(reached, config)(scope, Arrives().receive, send)
        assert sent[0]["status"] == status


@in_virtual_time
async def test_a_body_has_thirty_seconds():
    class Slow(Arrives):
        async def receive(self) -> Message:
            await asyncio.sleep(29.0)
            return await super().receive()

    assert await Slow(b"x").ask("/x") == 200
    assert await Slow(b"x", b"y").ask("/x") == 408


def exchange(url: str, data: bytes) -> bytes:
    """Send bytes on a connection of their own; return all that comes back."""
    parts = httpx.URL(url)
    with socket.create_connection((parts.host, parts.port), timeout=20) as client:
        client.sendall(data)
        received = b""
        while more := client.recv(1 << 16):
            received += more
    return received


HEAD = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.processes
@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"Host: evil.example\r\n\r\n",
        b"GET /version HTTP/1.1\r\n\r\n",
        HEAD + b"X: " + b"a" * 10_000 + b"\r\n\r\n",
        HEAD + b"a:\r\n" * 2_000,
        b"GET /" + b"a" * 100_000,
        HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nx",
        b"\x16\x03\x01\x02\x00\x01",
    ],
    ids=["hosts", "host", "header", "headers", "target", "lengths", "chunk", "tls"],
)
def test_malformed_requests_are_refused(engine_process: EngineProcess, data: bytes):
    answer = exchange(engine_process.url, data)
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "bad_request"


@pytest.mark.processes
def test_pipelined_calls_are_answered_in_order(engine_process: EngineProcess):
    body = b'{"lease_id": "x"}'
    post = b"POST /microserving/release HTTP/1.1\r\nHost: localhost\r\nContent-Length: 17\r\n\r\n"
    last = HEAD + b"Connection: close\r\n\r\n"
    answers = exchange(engine_process.url, (post + body) * 200 + last)
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == 201
    assert answers.count(b'{"released":true}') == 200

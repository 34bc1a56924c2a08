"""The REST API of a real engine process, and of an app in this process to time disconnects."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from engine_helpers import at_rest, running
from engine_process import EngineProcess, events

from engine.api.app import build_app
from engine.protocol.config import EngineConfig

PROMPT = [(7 * n) % 250 for n in range(40)]
START = {"request_id": "r", "prompt": PROMPT, "temperature": 0.0, "ignore_eos": True}
LONG = {**START, "max_tokens": 2000}
PREP = {"request_id": "r", "prompt": PROMPT, "end": 39}
SEND = {"request_id": "r", "prompt": PROMPT, "begin": 0, "end": 39, "kv_addr": "x"}


@pytest.fixture
def server(engine_process: EngineProcess) -> Iterator[EngineProcess]:
    """The shared process; after each test it must work and leak nothing."""
    yield engine_process
    engine_process.at_rest()
    assert len(engine_process.generate(PROMPT)) == 4
    engine_process.at_rest()


def error_of(reply: httpx.Response) -> tuple[int, str, str | None]:
    """Return status, type and param; the body must be exactly an error body."""
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"type", "message", "param", "code"}
    assert body["error"]["message"]
    return reply.status_code, body["error"]["type"], body["error"]["param"]


@pytest.mark.processes
def test_the_api_is_documented(server: EngineProcess):
    """The schema includes calls whose response class has no status code."""
    reply = httpx.get(f"{server.url}/openapi.json")
    assert reply.status_code == 200, reply.text
    for call in ("prep_recv", "remote_send", "start_generate", "stream", "prefixes"):
        assert f"/microserving/{call}" in reply.json()["paths"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("call", "body", "expected"),
    [
        *(
            (call, {**body, "prompt": prompt}, (400, "bad_request", param))
            for call, body in (
                ("prep_recv", PREP),
                ("remote_send", SEND),
                ("start_generate", START),
            )
            for prompt, param in (
                ([], "prompt"),
                ([512], "prompt"),
                ([10**30], "prompt"),
                ([1] * 8193, "prompt"),
                ("text", "prompt"),
                (None, "prompt"),
                ([1.5], "prompt.0"),
                ([-1], "prompt.0"),
                ([[1]], "prompt.0"),
            )
        ),
        ("prep_recv", {**PREP, "end": 41}, (400, "bad_range", "end")),
        ("prep_recv", {**PREP, "end": -41}, (400, "bad_range", "end")),
        ("prep_recv", {**PREP, "end": 10**30}, (400, "bad_range", "end")),
        ("prep_recv", {**PREP, "end": "39"}, (400, "bad_request", "end")),
        ("prep_recv", {**PREP, "reserve": 10**30}, (400, "bad_request", "end")),
        ("prep_recv", {**PREP, "lease_ms": 10**30}, (400, "bad_request", "lease_ms")),
        ("remote_send", SEND, (401, "bad_address", "kv_addr")),
        ("remote_send", {**SEND, "kv_addr": ""}, (401, "bad_address", "kv_addr")),
        ("remote_send", {**SEND, "kv_addr": "A" * 100_000}, (401, "bad_address", "kv_addr")),
        ("remote_send", {**SEND, "kv_addr": 1}, (400, "bad_request", "kv_addr")),
        ("remote_send", {**SEND, "begin": 39}, (400, "bad_range", "begin")),
        ("remote_send", {**SEND, "begin": 40}, (400, "bad_range", "begin")),
        ("remote_send", {**SEND, "begin": -41}, (400, "bad_range", "begin")),
        ("remote_send", {**SEND, "end": 41}, (400, "bad_range", "end")),
        ("start_generate", {**START, "begin": 40}, (400, "bad_range", "begin")),
        ("start_generate", {**START, "begin": -41}, (400, "bad_range", "begin")),
        ("start_generate", {**START, "lease_id": "never"}, (404, "unknown_lease", "lease_id")),
        ("start_generate", {**START, "max_tokens": 8192}, (400, "bad_request", "max_tokens")),
        ("start_generate", {**START, "temperature": -1}, (400, "bad_request", "temperature")),
        ("start_generate", {**START, "stop": "x"}, (400, "bad_request", "stop")),
        ("start_generate", {**START, "logit_bias": {"600": 1}}, (400, "bad_request", "logit_bias")),
        ("start_generate", {**START, "request_id": "x" * 129}, (400, "bad_request", "request_id")),
        ("start_generate", {**START, "surprise": 1}, (400, "bad_request", "surprise")),
        ("commit", {"lease_id": "never"}, (404, "unknown_lease", "lease_id")),
        ("commit", {}, (400, "bad_request", "lease_id")),
        ("release", {}, (400, "bad_request", "lease_id")),
        ("release", {"lease_id": "a", "request_id": "b"}, (400, "bad_request", "lease_id")),
    ],
)
def test_bad_calls(
    engine_process: EngineProcess, call: str, body: dict[str, Any], expected: tuple[int, str, str]
):
    assert error_of(engine_process.post(call, **body)) == expected


@pytest.mark.processes
def test_after_bad_calls_the_engine_works(server: EngineProcess):
    assert server.http.get("/health").status_code == 200


@pytest.mark.processes
@pytest.mark.parametrize(
    "call", ["prep_recv", "remote_send", "start_generate", "commit", "release"]
)
@pytest.mark.parametrize(
    "body", [b"", b"{", b"null", b"[]", b"\xff", b'"x"', b"{}{}", b"[" * 100_000, b"\0"]
)
def test_bodies_that_are_not_messages_are_refused(
    engine_process: EngineProcess, call: str, body: bytes
):
    reply = engine_process.http.post(f"/microserving/{call}", content=body)
    assert error_of(reply)[:2] == (400, "bad_request")


@pytest.mark.processes
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty"])
def test_non_finite_numbers_are_refused(engine_process: EngineProcess, field: str, number: str):
    body = json.dumps(START)[:-1] + f', "{field}": {number}}}'
    reply = engine_process.http.post("/microserving/start_generate", content=body)
    assert error_of(reply) == (400, "bad_request", field)


@pytest.mark.processes
def test_a_huge_body_is_too_large(server: EngineProcess):
    reply = server.http.post("/microserving/prep_recv", content=b" " * (50 << 20))
    assert error_of(reply)[:2] == (413, "too_large")


@pytest.mark.processes
def test_a_huge_body_of_unknown_length_is_too_large(server: EngineProcess):
    pieces = (b" " * (1 << 20) for _ in range(50))
    reply = server.http.post("/microserving/prep_recv", content=pieces)
    assert error_of(reply)[:2] == (413, "too_large")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/microserving/nothing", 404),
        ("GET", "/microserving/prep_recv", 405),
        ("POST", "/microserving/state", 405),
        ("DELETE", "/health", 405),
    ],
)
def test_unknown_paths_and_methods(server: EngineProcess, method: str, path: str, status: int):
    assert error_of(server.http.request(method, path))[:2] == (status, "bad_request")


@pytest.mark.processes
def test_a_generation_is_an_event_stream(server: EngineProcess):
    got = server.generate(PROMPT, max_tokens=6)
    assert got[0]["begin"] in (0, 32)
    assert got[-1]["finish_reason"] == "length"
    assert got[-1]["usage"]["completion_tokens"] == 6
    tokens = [token for event in got for token in event["token_ids"]]
    rest = server.generate(PROMPT, max_tokens=6, output=tokens[:2])
    assert [token for event in rest for token in event["token_ids"]] == tokens[2:]


@pytest.mark.processes
def test_an_engine_sends_to_itself(server: EngineProcess):
    """All receiving calls in one process, over shared memory."""
    prompt = [(n * n) % 250 for n in range(45)]
    got = server.post("prep_recv", request_id="self", prompt=prompt, end=44).json()
    assert error_of(server.post("commit", lease_id=got["lease_id"]))[:2] == (409, "kv_incomplete")
    body = {"request_id": "self", "prompt": prompt, "begin": 0, "end": 44}
    reply = server.post("remote_send", **body, kv_addr=got["kv_addr"]).json()
    assert reply["sent_tokens"] == reply["computed_tokens"] == 44
    assert server.state()["leases"][0]["state"] == "landed"
    again = server.post("remote_send", **body, kv_addr=got["kv_addr"])
    assert error_of(again)[:2] == (400, "bad_range")
    for _ in range(2):  # idempotent: the first reply may have been lost
        assert server.post("commit", lease_id=got["lease_id"]).json() == {"committed_tokens": 32}
    late = server.post("remote_send", **body, kv_addr=got["kv_addr"])
    assert error_of(late)[:2] == (410, "lease_expired")


@pytest.mark.processes
def test_another_prompt_or_a_changed_address_is_refused(server: EngineProcess):
    prompt = [(n * n + 1) % 250 for n in range(40)]
    got = server.post("prep_recv", request_id="forged", prompt=prompt, end=39).json()
    other = server.post("remote_send", **{**SEND, "kv_addr": got["kv_addr"]})
    assert error_of(other)[:2] == (401, "bad_address")
    address = got["kv_addr"]
    for forged in (address[:-3], address[1:], address[:50] + "AAAA" + address[54:]):
        assert error_of(server.post("remote_send", **{**SEND, "kv_addr": forged}))[0] == 401
    assert server.post("release", request_id="forged").json() == {"released": True}
    assert server.post("release", request_id="forged").json() == {"released": True}


@pytest.mark.processes
def test_an_expired_lease_is_gone(server: EngineProcess):
    prompt = PROMPT[::-1]
    got = server.post("prep_recv", request_id="r", prompt=prompt, end=39, lease_ms=1).json()
    body = {**START, "prompt": prompt, "lease_id": got["lease_id"], "begin": 39}
    assert error_of(server.post("start_generate", **body)) == (410, "lease_expired", "lease_id")


@pytest.mark.processes
def test_a_live_duplicate_is_refused(server: EngineProcess):
    with server.http.stream("POST", "/microserving/start_generate", json=LONG) as first:
        got = events(first)
        next(got)
        reply = server.post("start_generate", **START)
        assert error_of(reply) == (409, "duplicate_request", "request_id")
    server.at_rest()


@pytest.mark.processes
def test_a_full_queue_has_a_retry_after(server: EngineProcess):
    streams = []
    try:
        for number in range(6):
            stream = server.http.stream(
                "POST", "/microserving/start_generate", json={**LONG, "request_id": f"q{number}"}
            )
            assert stream.__enter__().status_code == 200
            streams.append(stream)
        reply = server.post("start_generate", **START)
        assert error_of(reply)[:2] == (429, "no_capacity")
        assert int(reply.headers["retry-after"]) >= 1
    finally:
        for stream in streams:
            stream.__exit__(None, None, None)


@pytest.mark.processes
def test_a_release_ends_a_stream_with_an_error(server: EngineProcess):
    body = {**LONG, "request_id": "to release"}
    with server.http.stream("POST", "/microserving/start_generate", json=body) as stream:
        got = events(stream)
        next(got)
        server.post("release", request_id="to release")
        assert "error" in list(got)[-1]


@pytest.mark.processes
def test_a_disconnect_from_a_stream_frees_its_pages(server: EngineProcess):
    with server.http.stream("POST", "/microserving/start_generate", json=LONG) as stream:
        next(events(stream))
    server.at_rest()


@pytest.mark.processes
@pytest.mark.parametrize("call", ["start_generate", "remote_send"])
def test_a_disconnect_from_a_waiting_call_frees_its_pages(server: EngineProcess, call: str):
    """The client disconnects while its call waits for KV or in the queue."""
    prompt = [(n * n * n) % 251 for n in range(500)]
    got = server.post("prep_recv", request_id="w", prompt=prompt, end=499).json()
    body = {"request_id": "w", "prompt": prompt, "begin": 499, "lease_id": got["lease_id"]}
    if call == "remote_send":
        body = {"request_id": "w", "prompt": prompt, "begin": 0, "end": 499}
        body["kv_addr"] = got["kv_addr"]
    raw = json.dumps(body).encode()
    head = f"POST /microserving/{call} HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Length: {len(raw)}\r\n\r\n"
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port)) as caller:
        caller.sendall(head.encode() + raw)
        while not (server.state()["waiting"] or server.state()["puts_in_flight"]):
            if call == "remote_send":  # the send may end before the test sees it
                break
    server.post("release", lease_id=got["lease_id"])
    server.at_rest()


@pytest.mark.processes
def test_model_and_state_describe_the_engine_to_a_router(server: EngineProcess):
    model = server.http.get("/microserving/model").json()
    assert (model["name"], model["vocab_size"], model["page_size"]) == ("tiny", 512, 16)
    assert json.loads(model["tokenizer_json"])["model"]["type"] == "BPE"
    state = server.state()
    assert state["pages"]["total"] == 200
    assert state["engine_id"] == server.url.removeprefix("http://")
    assert "version" in server.http.get("/version").json()
    text = server.http.get("/metrics").text
    assert "vllm:num_requests_running" in text and "microserve:pages_quarantined" in text


# A client that disconnects at an exact moment


class Caller:
    """An ASGI client that sends one body and disconnects when `gone` is set."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self._path = path
        self._body: bytes | None = json.dumps(body).encode()

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if not self.gone.is_set():  # as uvicorn does, without an error
            self.sent.append(message)

    async def call(self, app: Any) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [],
            "client": ("x", 1),
            "server": ("x", 2),
        }
        await app(scope, self.receive, self.send)


@pytest.mark.parametrize("moment", range(12))
async def test_a_disconnect_at_any_moment_leaves_nothing(
    moment: int, caplog: pytest.LogCaptureFixture
):
    """`moment` is a number of iterations of the event loop."""
    async with running() as engine:
        app = build_app(engine, EngineConfig(model="tiny"), 1)
        caller = Caller("/microserving/start_generate", {**LONG, "max_tokens": 900})
        call = asyncio.create_task(caller.call(app))
        for _ in range(moment):
            await asyncio.sleep(0)
        caller.gone.set()
        await asyncio.wait_for(call, 10)
        await at_rest(engine)
        assert not engine.generations
    assert "failed" not in caplog.text


async def test_a_disconnect_during_a_wait_is_no_failure(caplog: pytest.LogCaptureFixture):
    async with running() as engine:
        app = build_app(engine, EngineConfig(model="tiny"), 1)
        prep = Caller("/microserving/prep_recv", PREP)
        await prep.call(app)
        lease_id = json.loads(prep.sent[1]["body"])["lease_id"]
        caller = Caller(
            "/microserving/start_generate", {**START, "begin": 39, "lease_id": lease_id}
        )
        call = asyncio.create_task(caller.call(app))
        while not engine.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)
        caller.gone.set()
        await asyncio.wait_for(call, 10)
        assert engine.waiting == 0
        release = Caller("/microserving/release", {"lease_id": lease_id})
        await release.call(app)
    assert not caplog.records


async def test_shutdown_cancels_waiting_calls():
    async with running() as engine:
        app = build_app(engine, EngineConfig(model="tiny"), 1)
        caller = Caller("/microserving/start_generate", LONG | {"max_tokens": 900})
        call = asyncio.create_task(caller.call(app))
        while len(caller.sent) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not engine.generations


async def test_an_internal_error_is_reported_and_logged(caplog: pytest.LogCaptureFixture):
    async with running() as engine:
        engine.commit = lambda lease_id: 1 / 0  # type: ignore[assignment,method-assign,return-value]
        app = build_app(engine, EngineConfig(model="tiny"), 1)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            reply = await http.post("/microserving/commit", json={"lease_id": "x"})
    assert error_of(reply)[:2] == (500, "internal")
    assert "ZeroDivisionError" in caplog.text


async def test_a_stuck_or_dead_loop_is_unhealthy(caplog: pytest.LogCaptureFixture):
    async with running() as engine:
        config = EngineConfig(model="tiny", engine_id="e")
        transport = httpx.ASGITransport(build_app(engine, config, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/microserving/state")).json()["healthy"] is True
            engine.loop.stop()
            assert error_of(await http.get("/health"))[:2] == (500, "internal")
            assert (await http.get("/microserving/state")).json()["healthy"] is False


@pytest.mark.processes
@pytest.mark.parametrize(("path", "assets"), [("/docs", 3), ("/redoc", 2)])
def test_the_documentation_page_needs_no_other_host(server: EngineProcess, path: str, assets: int):
    page = server.http.get(path)
    assert page.status_code == 200
    addresses = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(addresses) == assets
    for address in addresses:
        assert address.startswith("/docs/")
        assert server.http.get(address).status_code == 200
    assert "/microserving/start_generate" in server.http.get("/openapi.json").json()["paths"]


@pytest.mark.processes
def test_statistics_have_the_engines_own_steps(server: EngineProcess):
    server.generate([11 + n % 400 for n in range(700)], max_tokens=40)
    reply = server.http.get("/microserving/statistics").json()
    prompts = [step for step in reply["steps"] if step[0] > 1]
    decodes = [step for step in reply["steps"] if step[2]]
    assert max(step[0] for step in prompts) == reply["token_budget"] == 512
    assert any(step[2] == 1 and 700 < step[3] < 740 for step in decodes)
    assert all(0 < step[4] < 20 for step in reply["steps"])
    assert (reply["max_batch"], reply["decode_slowdown"], reply["lease_ms"]) == (4, 1.5, 30_000)

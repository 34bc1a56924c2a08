"""The gate without a server: what it lets through, what it adds to responses, and what it ends."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from engine.protocol import BadRequest, Draining
from router.admission import Keys, RateLimits, Shutdown
from router.admission.keys import make_key
from router.api.gate import Gate, _Arriving
from router.api.http import HttpRequest, HttpResponse, json_response
from router.base import RouterConfig
from router.telemetry import Metrics

Handled = Callable[[HttpRequest], Awaitable[HttpResponse | None]]


async def answers(http: HttpRequest) -> HttpResponse:
    return json_response({"size": len(await http.read())})


class Connection:
    def __init__(self, *, arrived: bool = True, gone: bool = False) -> None:
        self.arrived, self.gone = arrived, gone
        self.task: Any = None
        self.calls: list[str] = []

    def cancels(self, task: Any) -> None:
        self.task = task

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def half_close(self) -> None:
        self.calls.append("half_close")

    def abort(self) -> None:
        self.calls.append("abort")


class Answer:
    """What a client receives."""

    def __init__(self, sent: list[Any]) -> None:
        heads = [one for one in sent if one["type"] == "http.response.start"]
        assert len(heads) == 1
        self.status: int = heads[0]["status"]
        self.headers = {name.lower(): value.decode() for name, value in heads[0]["headers"]}
        self.body = b"".join(one.get("body", b"") for one in sent[1:])

    @property
    def code(self) -> str | None:
        return str(json.loads(self.body)["error"]["code"])


class Alone:
    """A gate whose handler of `/v1/x` and `/health` is `handler`."""

    def __init__(
        self, handler: Handled = answers, *, key: str = "", requests: int = 0, **config: Any
    ) -> None:
        self.metrics, self.shutdown = Metrics(), Shutdown()
        router: Any = SimpleNamespace(
            config=RouterConfig(**config),
            keys=Keys([make_key(key)] if key else []),
            limits=RateLimits(requests, 0, lambda: 1000.0),
            metrics=self.metrics,
            shutdown=self.shutdown,
        )
        paths = ("/v1/x", "/health", "/docs/x", "/tokenize")
        handlers = {(method, path): handler for method in ("GET", "POST") for path in paths}
        self.gate = Gate(router, self.api, handlers)  # type: ignore[arg-type]
        self.sent: list[Any] = []

    async def api(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer with the path and the body, as FastAPI's functions do."""
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 202, "headers": []})
        await send({"type": "http.response.body", "body": scope["path"].encode() + body})

    async def ask(
        self,
        path: str = "/v1/x",
        body: bytes | None = b"{}",
        *,
        method: str = "POST",
        connection: Any = None,
        state: dict[str, Any] | None = None,
        **headers: str,
    ) -> None:
        """Send a request; a `body` of None never comes."""
        given = {"host": "localhost", **{n.replace("_", "-"): v for n, v in headers.items()}}
        self.sent.clear()

        async def receive() -> Any:
            if body is None:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            self.sent.append(message)

        scope = {
            "type": "http", "method": method, "path": path, "client": ("127.0.0.1", 5),
            "headers": [(n.encode(), v.encode()) for n, v in given.items()],
            "state": {**(state or {}), **({"connection": connection} if connection else {})},
        }  # fmt: skip
        await self.gate(scope, receive, send)

    async def answer(self, *args: Any, **named: Any) -> Answer:
        await self.ask(*args, **named)
        return Answer(self.sent)

    def counted(self, path: str, status: int) -> float:
        labels = {"path": path, "status": str(status)}
        name = "microserve_router_http_requests_total"
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


async def test_a_handlers_answer_is_sent_and_counted():
    alone = Alone()
    answer = await alone.answer()
    assert (answer.status, answer.body) == (200, b'{"size":2}')
    assert alone.counted("/v1/x", 200) == 1
    answer = await alone.answer("/elsewhere", b"abc")
    assert (answer.status, answer.body) == (202, b"/elsewhereabc")
    assert alone.counted("other", 202) == 1


async def test_a_handler_may_send_its_answer_itself():
    async def streams(http: HttpRequest) -> None:
        await http.stream([]).end(b"parts")

    answer = await Alone(streams).answer()
    assert (answer.status, answer.body) == (200, b"parts")


@pytest.mark.parametrize("given", ["x", "!~", "a" * 128])
async def test_the_clients_request_id_is_kept(given: str):
    answer = await Alone().answer(x_request_id=given)
    assert answer.headers[b"x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a" * 129, "a b", "é"])
async def test_any_other_request_id_is_replaced(given: str):
    alone, ids = Alone(), set()
    for _ in range(3):
        answer = await alone.answer(x_request_id=given)
        ids.add(answer.headers[b"x-request-id"])
    assert len(ids) == 3 and all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)


async def test_headers_tell_of_the_trace_the_times_and_the_limits():
    async def works(http: HttpRequest) -> HttpResponse:
        timings: Any = SimpleNamespace(server_timing=lambda: "total;dur=1")
        http.trace = SimpleNamespace(headers={"traceparent": "00-1"})  # type: ignore[assignment]
        http.receipt = SimpleNamespace(timings=lambda: timings)  # type: ignore[assignment]
        return json_response({})

    headers = (await Alone(works, requests=5).answer()).headers
    assert (headers[b"traceparent"], headers[b"server-timing"]) == ("00-1", "total;dur=1")
    assert headers[b"x-ratelimit-remaining-requests"] == "4"
    headers = (await Alone().answer()).headers
    assert not {b"traceparent", b"server-timing", b"x-ratelimit-remaining-requests"} & {*headers}


async def test_an_error_of_a_handler_is_the_answer(caplog: pytest.LogCaptureFixture):
    async def refuses(http: HttpRequest) -> HttpResponse:
        raise BadRequest("odd", param="p")

    async def fails(http: HttpRequest) -> HttpResponse:
        raise ZeroDivisionError

    answer = await Alone(refuses).answer()
    assert (answer.status, json.loads(answer.body)["error"]["param"]) == (400, "p")
    assert not caplog.records
    answer = await Alone(fails).answer(x_request_id="mine")
    assert answer.status == 500 and b"its log says how" in answer.body
    assert "request mine failed" in caplog.text and "ZeroDivisionError" in caplog.text


async def test_after_the_head_an_error_is_logged_and_not_sent(caplog: pytest.LogCaptureFixture):
    async def breaks(http: HttpRequest) -> HttpResponse:
        await http.stream([]).write(b"part")
        raise ZeroDivisionError

    answer = await Alone(breaks).answer()
    assert (answer.status, answer.body) == (200, b"part")
    assert "ZeroDivisionError" in caplog.text


async def test_what_the_server_found_wrong_is_refused():
    answer = await Alone().answer(state={"broken": "odd"})
    assert (answer.status, b"odd" in answer.body) == (400, True)
    connection = Connection()
    answer = await Alone().answer(state={"crowded": True}, connection=connection)
    assert answer.status == 503 and connection.calls == ["shutdown"]


# Connections


async def test_a_client_that_has_left_is_not_served():
    called: list[str] = []

    async def handler(http: HttpRequest) -> HttpResponse:
        called.append(http.id)
        return HttpResponse()

    alone = Alone(handler)
    await alone.ask(connection=Connection(gone=True))
    assert not called and not alone.sent
    await alone.ask(connection=(connection := Connection()))
    assert called and connection.task is asyncio.current_task()


@pytest.mark.parametrize("gone", [False, True])
async def test_a_cancellation_by_the_client_ends_the_request_in_peace(gone: bool):
    connection, alone = Connection(), Alone()

    async def leaves(http: HttpRequest) -> HttpResponse:
        connection.gone = gone
        raise asyncio.CancelledError

    alone = Alone(leaves)
    if gone:
        await alone.ask(connection=connection)
    else:
        with pytest.raises(asyncio.CancelledError):
            await alone.ask(connection=connection)
    assert not alone.sent


# Limits


async def test_without_a_key_nothing_is_served():
    alone = Alone(key="k")
    answer = await alone.answer()
    assert (answer.status, answer.code) == (401, "invalid_api_key")
    assert (await alone.answer(authorization="Bearer k")).status == 200
    for path in ("/health", "/docs/x"):
        assert (await alone.answer(path)).status == 200


async def test_requests_to_the_model_are_limited():
    alone = Alone(requests=1)
    assert (await alone.answer(method="GET")).status == 200  # does not count
    assert (await alone.answer("/tokenize")).status == 200
    assert (await alone.answer()).status == 200
    answer = await alone.answer()
    assert (answer.status, answer.headers[b"retry-after"]) == (429, "60")
    assert answer.headers[b"x-ratelimit-remaining-requests"] == "0"
    name = "microserve_router_rate_limited_total"
    assert alone.metrics.registry.get_sample_value(name, {"limit": "requests"}) == 1
    assert (await alone.answer("/tokenize")).status == 200


async def test_during_shutdown_nothing_new_goes_to_the_model():
    alone = Alone()
    alone.shutdown.begun = True
    answer = await alone.answer(connection=Connection())
    assert (answer.status, answer.code) == (503, "draining")
    assert (answer.headers[b"retry-after"], answer.headers[b"connection"]) == ("1", "close")
    for path, method in (("/v1/x", "GET"), ("/tokenize", "POST")):
        answer = await alone.answer(path, method=method, connection=Connection())
        assert (answer.status, answer.headers[b"connection"]) == (200, "close")
    alone.shutdown.begun = False
    assert b"connection" not in (await alone.answer(connection=Connection())).headers


@pytest.mark.parametrize(
    ("path", "most"),
    [("/health", 65536), ("/docs/x", 65536), ("/v1/x", 1 << 20), ("/tokenize", 1 << 20)],
)
async def test_bodies_are_limited_and_where_no_key_is_needed_more_so(path: str, most: int):
    alone = Alone(max_body_mb=1)
    answer = await alone.answer(path, b"x" * most)
    assert (answer.status, json.loads(answer.body)) == (200, {"size": most})
    assert (await alone.answer(path, b"x" * (most + 1))).status == 413


async def test_a_body_has_its_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.web.connection.LINGER_S", 0.0)
    connection = Connection(arrived=False)
    answer = await Alone(body_timeout_s=0.01).answer(body=None, connection=connection)
    assert answer.status == 408 and b"within 0.01 s" in answer.body
    assert answer.headers[b"connection"] == "close"
    assert connection.calls == ["half_close", "abort"]


# Shutdown


def request(path: str = "/v1/completions", method: str = "POST") -> Any:
    return SimpleNamespace(path=path, method=method, counted=lambda: None, task=None)


@pytest.mark.parametrize(
    ("path", "method", "counts"),
    [
        ("/v1/completions", "POST", True), ("/v1/models", "GET", False),
        ("/tokenize", "POST", False), ("/admin/v1/", "POST", False),
    ],
)  # fmt: skip
async def test_shutdown_waits_for_requests_to_the_model(path: str, method: str, counts: bool):
    shutdown = Shutdown()
    with _Arriving(shutdown, request(path, method)):
        assert await shutdown.finish(0) == counts
    assert await shutdown.finish(0) == 0


async def test_a_request_that_still_arrives_is_ended_as_draining():
    shutdown, late = Shutdown(), asyncio.Event()

    async def arrive() -> None:
        with _Arriving(shutdown, request()):
            await late.wait()

    arriving = asyncio.create_task(arrive())
    while not shutdown._running:  # noqa: ASYNC110
        await asyncio.sleep(0)
    shutdown.end_requests()
    with pytest.raises(Draining, match="before the request had arrived"):
        await arriving
    assert not shutdown._running


async def test_a_request_whose_work_is_counted_is_not_ended_here():
    shutdown, http = Shutdown(), request()
    with _Arriving(shutdown, http):
        http.counted()
        assert await shutdown.finish(0) == 0
        shutdown.end_requests()
        http.counted()  # once is enough
        await asyncio.sleep(0)
    assert not shutdown._running


async def test_a_failure_of_a_request_stays_what_it_is():
    shutdown = Shutdown()
    with pytest.raises(ZeroDivisionError), _Arriving(shutdown, request()):
        raise ZeroDivisionError
    assert not shutdown._running

    async def arrive() -> None:
        with _Arriving(shutdown, request()):
            await asyncio.Event().wait()

    arriving = asyncio.create_task(arrive())
    while not shutdown._running:  # noqa: ASYNC110
        await asyncio.sleep(0)
    arriving.cancel()  # its client has left
    with pytest.raises(asyncio.CancelledError):
        await arriving
    assert not shutdown._running

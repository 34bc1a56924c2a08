"""Deadlines, keys, limits, shutdown, receipts, traces and logs, as clients see them."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import logging
import re

import pytest
from waiting import until

from engine.protocol import NoCapacity
from router.cli.serve import router
from router.telemetry.logs import JsonFormatter, TextFormatter

pytestmark = pytest.mark.slow  # all of them: each waits a little

ASK = {"prompt": list(range(1, 41)), "max_tokens": 5, "temperature": 0, "return_token_ids": True}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def metrics(r) -> str:
    async with r.http.get(r.server.url + "/metrics") as response:
        return await response.text()


# Deadlines


async def test_a_deadline_names_the_phase(route, fake):
    p = fake("p", role="prefill", send_gate=asyncio.Event())
    d = fake("d", role="decode", gate=asyncio.Event())
    async with route(p, d, strategy="prefill_decode", request_timeout_s=60) as r:
        _, body = await r.post("/v1/completions", {**ASK, "timeout": 1.5})
        assert body["error"]["type"] == "timeout"
        assert "prefill (remote_send on p)" in body["error"]["message"]
        p.send_gate.set()
        headers = {"X-Request-Timeout": "1.5", "X-Request-Id": "x"}
        events = await r.events("/v1/completions", ASK, headers=headers)
        assert "decode (start_generate on d)" in events[-1]["error"]["message"]
        assert len(events) == 2  # the stream had begun and ends without [DONE]
        d.refuse["prep_recv"] = [NoCapacity("full", retry_after_s=1000)]
        status, body = await r.post("/v1/completions", ASK, headers=headers)
        assert (status, "in: queue" in body["error"]["message"]) == (504, True)
        await r.settled()
        assert (await r.receipt("x"))["status"] == "failed"
    assert not d.leases


async def test_clients_cannot_exceed_the_configured_timeout(route, fake):
    gate = asyncio.Event()
    async with route(fake("a", gate=gate), request_timeout_s=0.05) as r:
        for body, headers in (
            ({"timeout": 60}, {}), ({}, {"X-Request-Timeout": "60"}),
            ({"timeout": 60}, {"X-Request-Timeout": "1e7"}),
        ):  # fmt: skip
            status, _ = await r.post("/v1/completions", {**ASK, **body}, headers=headers)
            assert status == 504
        assert (await r.post("/v1/completions", {**ASK, "timeout": 0}))[0] == 400


async def test_a_request_timeout_that_is_no_duration_is_refused(route, fake):
    async with route(fake("a")) as r:
        for header in ("soon", "", "0", "-1", "nan", "inf", "-inf", "1e400", "1e8", "5s"):
            headers = {"X-Request-Timeout": header, "X-Request-Id": "x"}
            for body in (ASK, {**ASK, "timeout": 5}):
                status, answer = await r.post("/v1/completions", body, headers=headers)
                assert (status, answer["error"]["param"]) == (400, "X-Request-Timeout"), header
                assert answer["error"]["type"] == "invalid_request_error"
        assert r.idle()


def test_durations_may_have_a_unit():
    for flag in ("--request-timeout", "--request-timeout-s"):
        with router.make_context("router", [flag, "5"]) as context:
            assert context.params["request_timeout_s"] == 5.0


# Keys and limits


async def test_keys_are_rotated_without_a_restart(route, fake, tmp_path, caplog):
    path = tmp_path / "keys"
    hashed = hashlib.sha256(b"second").hexdigest()
    path.write_text(f"first name=ann\nsha256:{hashed} name=bob # hers\n")
    async with route(fake("a"), api_key="own", api_key_file=str(path), watch_s=0.002) as r:
        headers = {**bearer("first"), "X-Request-Id": "x"}
        for key, wanted in (("first", 200), ("second", 200), ("own", 200), ("third", 401)):
            assert (await r.post("/v1/completions", ASK, headers=bearer(key)))[0] == wanted
        assert (await r.post("/v1/completions", ASK, headers=headers))[0] == 200
        assert (await r.receipt("x"))["key"] == "ann"
        path.write_text("third\n")
        good = {"first": 401, "third": 200, "own": 200}
        while (await r.post("/v1/completions", ASK, headers=bearer("third")))[0] == 401:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        for key, wanted in good.items():
            assert (await r.post("/v1/completions", ASK, headers=bearer(key)))[0] == wanted
        path.write_text("a b c\n")
        await until(lambda: "stays in force" in caplog.text)
        for key, wanted in good.items():
            assert (await r.post("/v1/completions", ASK, headers=bearer(key)))[0] == wanted
        strange = {"Authorization": "Bearer \udcff\udc80"}
        assert (await r.post("/v1/completions", ASK, headers=strange))[0] == 401


async def test_no_message_shows_a_key(route, fake, tmp_path, caplog):
    path = tmp_path / "keys"
    path.write_text("the-secret-1\n")
    caplog.set_level(logging.DEBUG)
    settings = {"api_key": "the-secret-2", "admin_key": "the-secret-3", "watch_s": 0.002}
    async with route(fake("a"), api_key_file=str(path), **settings) as r:
        path.write_text("the-secret-4 name=x and more\n")
        await until(lambda: "not KEY" in caplog.text)
        shown = [repr(r.server.router.keys)]
        for key in ("the-secret-5", "the-secret-1"):
            for way in ("/v1/completions", "/admin/rollback"):
                async with r.http.post(r.server.url + way, json=ASK, headers=bearer(key)) as reply:
                    shown.append(f"{await reply.text()} {reply.headers}")
        shown.append(await metrics(r))
        shown.append(json.dumps(await r.get("/admin/engines", headers=bearer("the-secret-3"))))
        shown.append(repr(r.server.router.config))
    assert "the-secret" not in caplog.text + "".join(shown)


async def test_requests_per_minute_are_limited(route, fake):
    async with route(fake("a"), api_key="k", requests_per_minute=2) as r:
        url, headers = r.server.url + "/v1/completions", bearer("k")
        for left in (1, 0):
            async with r.http.post(url, json=ASK, headers=headers) as reply:
                assert reply.status == 200
                assert reply.headers["x-ratelimit-limit-requests"] == "2"
                assert reply.headers["x-ratelimit-remaining-requests"] == str(left)
        async with r.http.post(url, json={**ASK, "stream": True}, headers=headers) as reply:
            error = (await reply.json())["error"]
            assert (reply.status, error["code"]) == (429, "rate_limit_exceeded")
            assert 20 <= int(reply.headers["Retry-After"]) <= 30
            assert re.fullmatch(r"1m0s|[45]\d(\.\d)?s", reply.headers["x-ratelimit-reset-requests"])
        assert (await r.get("/v1/models", headers=headers))["data"]  # such requests do not count
        assert 'rate_limited_total{limit="requests"} 1.0' in await metrics(r)


async def test_tokens_per_minute_are_limited(route, fake, tmp_path):
    path = tmp_path / "keys"
    path.write_text("small name=small tpm=50\nlarge tpm=0\n")
    async with route(fake("a"), api_key_file=str(path), tokens_per_minute=1000) as r:
        for _ in range(3):
            async with r.http.post(
                r.server.url + "/v1/completions", json=ASK, headers=bearer("large")
            ) as reply:
                assert not [name for name in reply.headers if "ratelimit" in name.lower()]
        for wanted in (200, 200, 429):  # the second one overdraws
            status, _ = await r.post("/v1/completions", ASK, headers=bearer("small"))
            assert status == wanted


# Shutdown


async def test_shutdown_finishes_running_requests(route, fake):
    a = fake("a", gate=asyncio.Event())
    async with route(a) as r:
        ask = asyncio.create_task(r.events("/v1/completions", ASK))
        await a.until(lambda: a.running == 1)
        drained = asyncio.create_task(r.server.router.shutdown.finish(60))
        await until(lambda: r.server.router.shutdown.begun)
        async with r.http.get(r.server.url + "/health") as reply:
            assert (reply.status, (await reply.json())["status"]) == (503, "draining")
            assert reply.headers["Connection"] == "close"
        status, body = await r.post("/v1/completions", ASK)
        assert (status, body["error"]["code"]) == (503, "draining")
        async with r.http.post(r.server.url + "/v1/completions", json=ASK) as reply:
            assert reply.headers["Retry-After"] == "1"
        assert not drained.done()
        a.gate.set()
        assert (await ask)[-1] == "[DONE]"
        assert await drained == 0


async def test_shutdown_waits_for_requests_within_bounds(route, fake):
    a = fake("a", gate=asyncio.Event())
    async with route(a) as r:
        ask = asyncio.create_task(r.post("/v1/completions", ASK))
        await a.until(lambda: a.running == 1)
        assert await r.server.router.shutdown.finish(0.01) == 1
        r.server.router.shutdown.hurry()
        assert await r.server.router.shutdown.finish(60) == 1
        a.gate.set()
        assert (await ask)[0] == 200


# Receipts


async def test_the_phases_of_a_request_add_up(route, fake):
    p, d = fake("p", role="prefill"), fake("d", role="decode")
    async with route(p, d, strategy="prefill_decode") as r:
        headers = {"X-Request-Id": "x", "Accept": "text/event-stream"}
        async with r.http.post(
            r.server.url + "/v1/completions", json={**ASK, "stream": True}, headers=headers
        ) as reply:
            timing = reply.headers["Server-Timing"]
            text = await reply.text()
        receipt = await r.receipt("x")
        async with r.http.post(r.server.url + "/v1/completions", json=ASK) as reply:
            whole = reply.headers["Server-Timing"]
        assert ": server-timing" not in "".join(
            str(event) for event in await r.events("/v1/completions", ASK)
        )
    events, phases = receipt["events"], receipt["breakdown_ms"]
    assert list(events) == [
        "issued", "prefill_begin", "prefill_end", "migration_begin", "migration_end",
        "decode_begin", "decode_end",
    ]  # fmt: skip
    assert sorted(events.values()) == list(events.values())
    assert sum(phases.values()) == pytest.approx(receipt["ms"])
    assert min(phases.values()) >= 0 and phases["prefill"] > 0
    for header in (timing, whole):
        assert [part.partition(";")[0] for part in header.split(", ")] == [
            "queue", "prefill", "migration", "decode", "total",
        ]  # fmt: skip
    *_, comment, done, end = text.split("\n\n")
    assert comment.startswith(": server-timing queue;dur=")
    assert (done, end) == ("data: [DONE]", "")


async def test_fallbacks_are_named(route, fake):
    async with route(fake("a"), strategy="prefill_decode") as r:
        await r.post("/v1/completions", ASK, headers={"X-Request-Id": "x"})
        assert (await r.receipt("x"))["fallbacks"] == ["collapsed"]
        assert 'microserve_router_fallbacks_total{fallback="collapsed"} 1.0' in await metrics(r)


@pytest.mark.slow
async def test_series_of_old_generations_are_dropped(route, fake):
    async with route(fake("a")) as r:
        strategy = r.server.router.revisions.active.bound.strategy
        for _ in range(40):
            await r.post("/v1/completions", ASK)
            r.use(strategy)
        text = await metrics(r)
    series = [line for line in text.splitlines() if line.startswith("microserve_router_requests_t")]
    assert len(series) == 32
    assert 'generation="40"' in text and 'generation="8"' not in text


# Traces and logs


async def test_a_trace_is_begun_unless_the_client_sends_one(route, fake):
    a = fake("a")
    async with route(a) as r:
        for given in (
            None,
            "nonsense",
            f"ff{TRACE[2:]}",
            TRACE.replace("b7ad6b7169203331", "0" * 16),
        ):
            headers = {} if given is None else {"traceparent": given}
            async with r.http.post(
                r.server.url + "/v1/completions", json=ASK, headers=headers
            ) as reply:
                made = reply.headers["traceparent"]
            assert a.headers[-1]["traceparent"] == made != given
            assert len(made) == len(TRACE)
        async with r.http.post(
            r.server.url + "/v1/completions", json=ASK, headers={"traceparent": TRACE}
        ) as reply:
            assert reply.headers["traceparent"] == TRACE


@pytest.mark.parametrize("format", ["json", "text"])
async def test_logs_say_which_request_they_are_about(route, fake, format):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logger = logging.getLogger("router")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        async with route(fake("a")) as r:
            await r.post("/v1/completions", ASK, headers={"X-Request-Id": "my-id"})
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    (line,) = [line for line in stream.getvalue().splitlines() if "request done" in line]
    if format == "json":
        fields = json.loads(line)
        assert (fields["request_id"], fields["strategy"], fields["generation"]) == (
            "my-id", "data_parallel", 1,
        )  # fmt: skip
        assert (fields["completion_tokens"], fields["level"]) == (5, "info")
    else:
        assert "[my-id data_parallel/1]: request done" in line
        assert "completion_tokens=5" in line


async def test_shutdown_waits_for_requests_that_still_arrive(route, fake):
    data = json.dumps(ASK).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    ).encode()
    async with route(fake("a")) as r:
        port = int(r.server.url.rsplit(":", 1)[1])
        shutdown = r.server.router.shutdown
        for rest, status in ((data[10:], b" 200 "), (b"", b" 503 ")):
            shutdown.begun = False
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + data[:10])
            await until(lambda: shutdown._running)
            finishing = asyncio.create_task(shutdown.finish(60 if rest else 0.05))
            await until(lambda: shutdown.begun)
            assert not finishing.done()
            writer.write(rest)
            assert await finishing == (0 if rest else 1)
            shutdown.end_requests()
            assert status in await reader.readline()
            writer.close()
            shutdown._over.clear()

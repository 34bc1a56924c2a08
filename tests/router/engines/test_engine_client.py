"""What the router accepts as an engine's reply, and how much of it, without a connection."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from unittest import mock

import pytest
from stub_engine import StubEngine, model_info
from virtual_time import in_virtual_time

from engine.protocol import BadRequest, Internal, NoCapacity
from router.base.errors import EngineUnreachable
from router.engines import client as module
from router.engines.client import ADDRESS, DEFAULT_MAX_TOKENS, MODEL, SMALL, STATE, EngineClient
from router.engines.http_client import Reply
from router.engines.token_mux import MuxStream

CHANGE = b'{"added": [], "removed": []}\n'


class Http:
    """An HTTP client that gets `replies`, one for each call."""

    url = "http://e:1"

    def __init__(self, *replies: Any, status: int = 200) -> None:
        self.replies = [json.dumps(reply).encode() for reply in replies]
        self.status = status
        self.retry_after: str | None = None
        self.asked: list[tuple[str, str, int]] = []
        self.bodies: list[bytes] = []
        self.retired = False

    async def call(
        self, method: str, path: str, body: bytes, headers: Any, *, most: int = 0
    ) -> Reply:
        self.asked.append((method, path, most))
        self.bodies.append(body)
        await asyncio.sleep(0)
        return Reply(self.status, self.retry_after, self.replies.pop(0))

    async def listen(self, path: str, sink: Any, lost: Any) -> tuple[Reply, Any]:
        self.asked.append(("GET", path, 0))
        self.sink, self.lost = sink, lost
        return Reply(self.status, None, b"{}"), lambda: setattr(self, "retired", True)

    def retire(self) -> None:
        self.retired = True


def client(*replies: Any, **options: Any) -> tuple[EngineClient, Http]:
    http: Any = Http(*replies, **options)
    return EngineClient(http), http


def lease(match_len: int, end: int) -> dict[str, Any]:
    return {
        "lease_id": "l", "kv_addr": "a", "match_len": match_len, "end": end, "expires_ms": 1,
    }  # fmt: skip


# Replies


@pytest.mark.parametrize(
    ("match_len", "end", "good"),
    [(0, 39, True), (39, 39, True), (40, 39, False), (0, 40, False), (0, 38, False)],
)
async def test_a_lease_is_the_one_that_was_asked_for(match_len, end, good):
    engine, _ = client(lease(match_len, end))
    if good:
        assert (await engine.prep_recv({"end": 39}, {})).match_len == match_len
    else:
        with pytest.raises(Internal, match=r"made a lease of \[\d+, \d+\) for end=39"):
            await engine.prep_recv({"end": 39}, {})


@pytest.mark.parametrize("call", ["pin", "unpin"])
@pytest.mark.parametrize("count", [0, 3, -1, "3", 3.5, None, ...])
async def test_a_count_is_a_natural_number(call, count):
    name = f"{call}ned_tokens"
    engine, _ = client([] if count is ... else {name: count})
    if count in (0, 3):
        assert await getattr(engine, call)({}, {}) == count
    else:
        with pytest.raises(Internal, match=f"has no {name}"):
            await getattr(engine, call)({}, {})


async def test_each_reply_has_its_own_bound():
    sent = {"sent_tokens": 0, "cached_tokens": 0, "computed_tokens": 0, "bytes": 0, "ms": 0}
    state = (await StubEngine().state()).model_dump()
    engine, http = client(
        lease(0, 1), sent, {}, {}, {}, {"pinned_tokens": 0}, {"unpinned_tokens": 0},
        model_info().model_dump(), state, {},
    )  # fmt: skip
    await engine.prep_recv({"end": 1}, {})
    for call in ("remote_send", "mirror", "commit", "release", "pin", "unpin"):
        await getattr(engine, call)({}, {})
    await engine.model()
    await engine.state()
    await engine.health()
    assert http.asked == [
        ("POST", "/microserving/prep_recv", ADDRESS),
        *(
            ("POST", f"/microserving/{call}", SMALL)
            for call in ("remote_send", "mirror", "commit", "release", "pin", "unpin")
        ),
        ("GET", "/microserving/model", MODEL),
        ("GET", "/microserving/state", STATE),
        ("GET", "/health", SMALL),
    ]
    assert SMALL < STATE < ADDRESS < MODEL


async def test_a_state_that_tells_the_health_saves_a_call():
    state = (await StubEngine().state()).model_dump()
    told = [{**state, "healthy": healthy} for healthy in (True, None, False)]
    engine, http = client({}, told[0], told[1], {}, told[2])
    for _ in range(2):
        await engine.health()
        await engine.state()
    await engine.health()
    with pytest.raises(Internal, match="no progress"):
        await engine.state()
    asked = [path for _, path, _ in http.asked]
    of_state = "/microserving/state"
    assert asked == ["/health", of_state, of_state, "/health", of_state]


@pytest.mark.parametrize("status", [200, 399, 400, 429, 500])
async def test_an_error_is_told_by_the_status(status):
    error = {"error": {"type": "bad_request", "message": "no", "param": "x"}}
    engine, _ = client(error, status=status)
    if status < 400:
        await engine.release({}, {})
    else:
        with pytest.raises(BadRequest, match="no") as refused:
            await engine.release({}, {})
        assert refused.value.param == "x"


async def test_the_time_to_wait_is_that_of_the_header():
    engine, http = client({"error": {"type": "no_capacity", "message": "full"}}, status=429)
    http.retry_after = "7"
    with pytest.raises(NoCapacity) as full:
        await engine.commit({}, {})
    assert full.value.retry_after_s == 7
    http.replies, http.status = [b"<html>" + b"x" * 1000], 503
    with pytest.raises(Internal, match="503 b'<html>x") as odd:
        await engine.commit({}, {})
    assert len(odd.value.message) < 300


async def test_a_reply_of_another_form_names_the_field():
    engine, _ = client({"sent_tokens": "x" * 10_000})
    with pytest.raises(Internal, match="no RemoteSendReply: sent_tokens") as wrong:
        await engine.remote_send({}, {})
    assert len(wrong.value.message) <= module.MESSAGE


# Generations


async def started(engine: EngineClient, **fields: Any) -> tuple[MuxStream, Any]:
    stream = MuxStream()

    async def only() -> MuxStream:
        return stream

    engine._token_mux.stream = only  # type: ignore[method-assign]
    body = {"request_id": "a", "prompt": [1], **fields}
    try:
        return stream, await engine.start_generate(body, {})
    finally:
        assert "stream_id" not in body  # the caller may send its body again


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({}, DEFAULT_MAX_TOKENS),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "output": [7, 8]}, 3),
        ({"output": [7]}, DEFAULT_MAX_TOKENS - 1),
    ],
)
async def test_a_generation_has_no_more_tokens_than_are_left(fields, left):
    engine, http = client({"request_id": "a"})
    stream, delivery = await started(engine, **fields)
    sent = json.loads(http.bodies[0])
    assert (sent["stream"], sent["stream_id"]) == ("mux", stream.id)
    stream._feed(json.dumps({"a": {"token_ids": [1] * left}}).encode() + b"\n")
    assert delivery.progress() == 1
    stream._feed(b'{"a": {"token_ids": [1]}}\n')
    assert delivery.progress() is None


async def test_a_generations_tokens_are_in_the_models_vocabulary():
    engine, _ = client(model_info(vocab_size=50).model_dump(), {}, {})
    await engine.model()
    for token, good in ((49, True), (50, False)):
        stream, delivery = await started(engine)
        stream._feed(b'{"a": {"token_ids": [%d]}}\n' % token)
        assert (delivery.progress() is not None) is good


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_refused_generation_is_not_expected(cancelled):
    engine, _ = client({"error": {"type": "bad_request", "message": "no"}}, status=400)
    stream = MuxStream()

    async def only() -> MuxStream:
        return stream

    engine._token_mux.stream = only  # type: ignore[method-assign]
    asking = asyncio.ensure_future(engine.start_generate({"request_id": "a"}, {}))
    await asyncio.sleep(0)
    assert stream._deliveries
    if cancelled:
        asking.cancel()
    with pytest.raises(asyncio.CancelledError if cancelled else BadRequest):
        await asking
    assert not stream._deliveries


async def test_closing_ends_stream_and_connections():
    engine, http = client({})
    stream, _ = await started(engine)
    engine._token_mux._stream = stream
    stream._close_connection = lambda: None
    engine.close()
    assert http.retired and stream.error is not None


# Prefixes


COST = len(CHANGE) - 1 + module.LINE  # what a line counts for


async def followed() -> tuple[Any, Http]:
    """Return a feed of prefixes whose first line has been read."""
    engine, http = client()
    feed = engine.prefixes()
    first = asyncio.ensure_future(anext(feed))
    await asyncio.sleep(0)
    http.sink(CHANGE)
    assert (await first).added == []
    return feed, http


async def test_prefixes_that_wait_to_be_read_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "WAITING", 3 * COST)
    feed, http = await followed()
    for _ in range(2):  # what was read counts no longer
        http.sink(CHANGE * 3)
        for _ in range(3):
            await anext(feed)
    http.sink(CHANGE * 4)
    with pytest.raises(EngineUnreachable, match="change faster"):
        await anext(feed)
    assert http.retired


@pytest.mark.parametrize("how", ["gone", "more than 100 bytes"])
async def test_a_lost_feed_fails_at_once(monkeypatch, how):
    """And drops what waits: it is of no use any more."""
    monkeypatch.setattr(module, "FRAME", 100)
    feed, http = await followed()
    http.sink(CHANGE * 2 + b"x" * 70)
    if how == "gone":
        http.lost(EngineUnreachable("gone"))
    else:
        http.sink(b"x" * 31)
    http.lost(EngineUnreachable("once more"))
    take = http.sink.__self__
    http.sink(CHANGE)
    assert not take._ready
    with pytest.raises(EngineUnreachable, match=how):
        await anext(feed)
    assert http.retired


@in_virtual_time
async def test_many_prefixes_are_read_at_a_pace():
    """So they leave the event loop to others."""
    with (
        mock.patch.object(module, "BATCH", 10 * COST),
        mock.patch.object(module, "PACE", 5 * COST),
    ):
        feed, http = await followed()
        http.sink(CHANGE * 24)
        times = []
        for _ in range(24):
            await anext(feed)
            times.append(asyncio.get_running_loop().time())
        assert times == [0.0] * 9 + [2.0] * 10 + [4.0] * 5
        await feed.aclose()
    assert http.retired


async def test_an_engine_without_prefixes_raises_its_error():
    engine, http = client(status=404)
    with pytest.raises(Internal):
        await anext(engine.prefixes())
    assert http.retired


@pytest.mark.parametrize("how", ["loss", "line"])
async def test_a_reader_of_prefixes_is_woken(how):
    feed, http = await followed()
    reading = asyncio.ensure_future(anext(feed))
    await asyncio.sleep(0)
    assert not reading.done()
    if how == "loss":
        http.lost(EngineUnreachable("gone"))
        with pytest.raises(EngineUnreachable, match="gone"):
            await reading
        assert http.retired
    else:
        http.sink(CHANGE[:5])  # no whole line yet
        await asyncio.sleep(0)
        assert not reading.done()
        http.sink(CHANGE[5:])
        assert (await reading).removed == []
        await feed.aclose()

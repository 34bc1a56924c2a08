"""What a router takes from an engine's token stream, and where it stops, without a connection."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from virtual_time import in_virtual_time

from engine.protocol import Draining, Internal
from router.base.errors import EngineUnreachable
from router.engines import token_mux as module
from router.engines.http_client import Reply
from router.engines.token_mux import IDLE_S, MuxStream, TokenMux

DRAINING = {"type": "draining", "message": "bye", "param": None, "code": None}


def frame(**events: dict[str, Any]) -> bytes:
    return json.dumps(events).encode() + b"\n"


def logprob(**changes: Any) -> dict[str, Any]:
    one = {"token_id": 1, "token": "x", "bytes": [255], "logprob": -1.0}
    return {**one, "top": [one], **changes}


# The end


@pytest.mark.parametrize(
    "end",
    [
        {"finish_reason": "stop", "stop_reason": "END"},
        {"finish_reason": "length"},
        {"error": DRAINING},
    ],
    ids=["stop string", "length", "error"],
)
async def test_nothing_is_delivered_after_the_end(end):
    """As from an engine that computes a few tokens more before it notices the stop string."""
    stream = MuxStream()
    delivery, other = stream.expect("a", tokens=10), stream.expect("b", tokens=10)
    later = frame(a={"token_ids": [2], "text": "y"}, b={"token_ids": [7]})
    stream._feed(frame(a={"token_ids": [1], "text": "x", **end}) + later)
    assert not stream.expects(delivery) and stream.expects(other)
    assert (delivery.progress(), other.progress()) == (None, 1)
    stream._feed(later)
    chunk = await delivery.next()
    assert (chunk.token_ids, chunk.text) == ([1], "x")
    assert chunk.finish_reason == end.get("finish_reason")
    if "error" in end:
        delivery.abort("too late")
        with pytest.raises(Draining, match="bye"):
            await delivery.next()
    assert (await other.next()).token_ids == [7, 7]


async def test_an_error_without_tokens_is_raised_at_once():
    stream = MuxStream()
    delivery = stream.expect("a")
    stream._feed(frame(a={"error": DRAINING}))
    with pytest.raises(Draining):
        await delivery.next()


async def test_an_aborted_delivery_drops_what_has_come():
    stream = MuxStream()
    delivery = stream.expect("a")
    waiting = asyncio.ensure_future(stream.expect("b").next())
    stream._feed(frame(a={"token_ids": [1]}))
    delivery.abort("no longer wanted")
    with pytest.raises(EngineUnreachable, match="no longer wanted"):
        await delivery.next()
    assert not stream.expects(delivery)
    assert not waiting.done()
    waiting.cancel()


async def test_a_cancelled_wait_loses_no_token():
    stream = MuxStream()
    delivery = stream.expect("a")
    waiting = asyncio.ensure_future(delivery.next())
    await asyncio.sleep(0)
    waiting.cancel()
    stream._feed(frame(a={"token_ids": [1]}))
    await asyncio.wait([waiting])
    stream._feed(frame(a={"token_ids": [2]}))
    assert (await delivery.next()).token_ids == [1, 2]


async def test_a_forgotten_delivery_does_not_end_its_successor():
    stream = MuxStream()
    first = stream.expect("a")
    second = stream.expect("a")
    stream.forget(first)
    assert stream.expects(second)
    stream._feed(frame(a={"token_ids": [1]}))
    assert (await second.next()).token_ids == [1]


# Bounds


async def check_bound(limits: dict[str, int], good: list[dict], wrong: dict, why: str) -> None:
    """Check that `good` events are delivered, and that a `wrong` one then fails the request."""
    stream = MuxStream()
    delivery, other = stream.expect("a", **limits), stream.expect("b")
    for event in good:
        stream._feed(frame(a=event))
    assert stream.expects(delivery)
    stream._feed(frame(a=wrong) + frame(a={"token_ids": []}))
    assert not stream.expects(delivery)
    if good:
        wanted = [token for event in good for token in event["token_ids"]]
        assert (await delivery.next()).token_ids == wanted
    with pytest.raises(EngineUnreachable, match=why):
        await delivery.next()
    assert stream.error is None and stream.expects(other)  # it fails no other request


@pytest.mark.parametrize(
    ("good", "wrong"),
    [
        ([[1, 2], [3]], [4]),
        ([[1]], [2, 3, 4]),
        ([], [1, 2, 3, 4]),
    ],
)
async def test_no_more_tokens_than_were_asked_for(good, wrong):
    events = [{"token_ids": ids} for ids in good]
    await check_bound({"tokens": 3}, events, {"token_ids": wrong}, "more than max_tokens")


async def test_no_token_outside_the_vocabulary():
    good = [{"token_ids": [0, 999]}]
    for token in (1000, 5000):
        why = f"token {token}, outside the vocabulary of 1000"
        await check_bound({"vocab": 1000}, good, {"token_ids": [1, token, 2]}, why)


@pytest.mark.parametrize("ids", [[], [1], [1, 2]])
async def test_no_more_text_than_tokens_can_have(monkeypatch, ids):
    monkeypatch.setattr(module, "TEXT_ALONE", 10)
    monkeypatch.setattr(module, "TEXT_PER_TOKEN", 5)
    most = 10 + 5 * len(ids)
    good = [{"token_ids": ids, "text": "x" * (most - 3)}, {"token_ids": [], "text": "x" * 3}]
    wrong = {"token_ids": [], "text": "x"}
    if not ids:  # nothing but text is a chunk without tokens
        good = [{"token_ids": [], "text": "x" * most}]
    await check_bound({}, good, wrong, "more text")


@pytest.mark.parametrize(
    ("good", "wrong", "why"),
    [
        ([logprob()], [logprob()] * 2, "more logprobs than tokens"),
        ([logprob(top=[])], [logprob(top=None)], "invalid logprobs"),
        (
            [logprob(top=[logprob()] * 64)],
            [logprob(top=[logprob()] * 65)],
            "invalid logprobs.*length <= 64",
        ),
        ([logprob(token="x" * 4096)], [logprob(token="x" * 4097)], "length <= 4096"),
        ([logprob(bytes=[0] * 16384)], [logprob(bytes=[0] * 16385)], "length <= 16384"),
        ([logprob(bytes=[0, 255])], [logprob(bytes=[256])], "<= 255"),
        ([logprob(logprob=None)], [{"token_id": 1}], "invalid logprobs"),
        ([logprob(token_id=2**31 - 1)], [logprob(token_id=-1)], ">= 0"),
    ],
    ids=["count", "fields", "top", "token", "bytes", "byte", "missing", "id"],
)
async def test_logprobs_are_those_of_the_tokens(good, wrong, why):
    events = [{"token_ids": [1], "logprobs": good}]
    await check_bound({}, events, {"token_ids": [1], "logprobs": wrong}, why)


def test_frames_for_nobody_are_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(module, "MOST_UNWANTED", 100)
    strange = frame(nobody={"token_ids": [5]})
    stream = MuxStream()
    for _ in range(3):
        stream._feed(b"\n" * (100 - len(strange)) + strange)
        assert stream.error is None
        stream.expect("a")
        stream._feed(frame(a={"token_ids": [1]}, nobody={"token_ids": [5]}))  # then it starts anew
    stream._feed(b"\n" * 100)
    assert stream.error is None
    stream._feed(b"\n")
    assert "100 bytes of frames that nobody asked for" in str(stream.error)


async def test_a_frame_without_an_end_is_bounded_and_closes_the_connection(monkeypatch):
    monkeypatch.setattr(module, "MOST_FRAME", 100)
    stream, closed = MuxStream(), []
    stream._close_connection = lambda: closed.append(True)
    delivery = stream.expect("a")
    stream._feed(b"x" * 100)
    assert stream.error is None and not closed
    stream._feed(b"x")
    assert stream.error is not None and closed == [True]
    with pytest.raises(EngineUnreachable, match="more than 100 bytes"):
        await delivery.next()
    stream._feed(b"x" * 1000)
    assert closed == [True]


# The stream's life


class Http:
    """The client of an engine that answers `listen` with `status`, after it has sent `first`."""

    url = "http://e:1"

    def __init__(self, status: int = 200, first: bytes = b"\n") -> None:
        self.status, self.first = status, first
        self.paths: list[str] = []
        self.open = 0

    async def listen(self, path: str, sink: Any, lost: Any) -> tuple[Reply, Any]:
        await asyncio.sleep(0)
        self.paths.append(path)
        self.open += 1
        self.sink, self.lost = sink, lost
        sink(self.first)
        return Reply(self.status, None, b"no"), self._close

    def _close(self) -> None:
        self.open -= 1


async def test_a_stream_that_begins_wrong_is_closed():
    http: Any = Http(first=b"nonsense\n")
    with pytest.raises(EngineUnreachable, match="invalid frame"):
        await TokenMux(http).stream()
    assert http.open == 0
    with pytest.raises(Internal, match="no stream but 201"):
        await TokenMux(Http(status=201)).stream()  # type: ignore[arg-type]
    with pytest.raises(Internal, match="no stream but 101"):
        await TokenMux(Http(status=101)).stream()  # type: ignore[arg-type]


async def test_a_stream_is_opened_once_and_again_after_its_loss():
    http: Any = Http()
    mux = TokenMux(http)
    streams = await asyncio.gather(*(mux.stream() for _ in range(3)))
    assert len(set(streams)) == len(http.paths) == 1
    assert http.paths[0] == f"/microserving/stream?id={streams[0].id}"
    http.lost(EngineUnreachable("first"))
    http.lost(EngineUnreachable("second"))
    assert str(streams[0].error) == "first"
    with pytest.raises(EngineUnreachable):
        await streams[0].expect("a").next()
    assert await mux.stream() is not streams[0]
    assert len(http.paths) == 2


async def test_a_caller_that_leaves_does_not_keep_others_from_a_stream():
    http: Any = Http()
    mux = TokenMux(http)
    leaving = asyncio.ensure_future(mux.stream())
    staying = asyncio.ensure_future(mux.stream())
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await staying).error is None


async def test_closing_fails_what_is_awaited_and_is_done_once():
    http: Any = Http()
    mux = TokenMux(http)
    mux.close()  # none is open
    delivery = (await mux.stream()).expect("a")
    for _ in range(2):
        mux.close()
        assert http.open == 0
    with pytest.raises(EngineUnreachable, match="was closed"):
        await delivery.next()


@in_virtual_time
async def test_a_stream_without_use_is_closed():
    loop = asyncio.get_running_loop()
    http: Any = Http()
    stream = await TokenMux(http).stream()
    stream.forget(stream.expect("a"))
    await asyncio.sleep(1.5 * IDLE_S)
    assert stream.error is None
    delivery = stream.expect("b")  # keeps it open, however long it takes
    await asyncio.sleep(10 * IDLE_S)
    assert stream.error is None
    stream.forget(delivery)
    began = loop.time()
    await asyncio.sleep(1.01 * IDLE_S)
    assert stream.error is not None and http.open == 0, loop.time() - began


@in_virtual_time
async def test_a_lost_stream_is_not_closed_later():
    http: Any = Http()
    stream = await TokenMux(http).stream()
    http.lost(EngineUnreachable("gone"))
    await asyncio.sleep(10 * IDLE_S)
    assert http.open == 1  # `_close` was not called: it could close another's connection
    assert str(stream.error) == "gone"


# Defaults and ends


async def test_any_token_is_taken_unless_a_vocabulary_is_given():
    stream = MuxStream()
    delivery = stream.expect("a")
    stream._feed(frame(a={"token_ids": [2**31 - 1] * 100}))
    assert (await delivery.next()).token_ids == [2**31 - 1] * 100
    stream._feed(frame(a={"token_ids": [2**31]}))
    assert "invalid frame" in str(stream.error)


def test_a_new_stream_takes_no_more_for_nobody_than_a_used_one(monkeypatch):
    monkeypatch.setattr(module, "MOST_UNWANTED", 100)
    stream = MuxStream()
    stream._feed(b"\n" * 100)
    assert stream.error is None
    stream._feed(b"\n")
    assert stream.error is not None


@pytest.mark.parametrize("how", ["fails", "ends"])
async def test_what_comes_for_a_reader_that_was_just_cancelled_harms_nothing(how):
    stream = MuxStream()
    delivery, other = stream.expect("a"), stream.expect("b")
    waiting = asyncio.ensure_future(delivery.next())
    await asyncio.sleep(0)
    waiting.cancel()
    if how == "fails":
        delivery.fail(EngineUnreachable("gone"))
    else:
        stream._lose(EngineUnreachable("gone"))
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    for one in (delivery, other) if how == "ends" else (delivery,):
        with pytest.raises(EngineUnreachable, match="gone"):
            await one.next()


async def test_a_delivery_of_a_lost_stream_fails_and_is_not_expected():
    stream = MuxStream()
    stream._lose(EngineUnreachable("gone"))
    delivery = stream.expect("a")
    assert not stream.expects(delivery) and delivery.progress() is None
    with pytest.raises(EngineUnreachable, match="gone"):
        await delivery.next()

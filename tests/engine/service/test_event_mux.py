"""The multiplexed stream of real engine processes."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from typing import Any

import pytest
from engine_helpers import running
from engine_helpers import start as generation
from engine_process import EngineProcess

from engine.protocol import PeerUnreachable

PROMPT = [(7 * n) % 250 for n in range(40)]


class Reader:
    """One open stream, read in a thread until `cut`."""

    def __init__(self, engine: EngineProcess, id: str) -> None:
        self.frames: list[dict[str, Any]] = []
        give_up = time.monotonic() + 20
        while True:
            self._connection = HTTPConnection("127.0.0.1", engine.port)
            self._connection.request("GET", f"/microserving/stream?id={id}")
            self._reply = self._connection.getresponse()
            # 409: the engine has not yet noticed that the stream of another test has closed.
            if self._reply.status != 409 or time.monotonic() > give_up:
                break
            self._connection.close()
        assert self._reply.status == 200
        assert self._reply.readline() == b"\n"
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with suppress(OSError):
            while line := self._reply.readline():
                self.frames.append(json.loads(line))

    def cut(self) -> None:
        """Close the connection as the kernel does for a killed router."""
        with suppress(OSError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)
        self.join()

    def join(self) -> None:
        """Wait until the stream has ended."""
        self._thread.join(20)
        assert not self._thread.is_alive()

    def events(self, request_id: str) -> list[dict[str, Any]]:
        return [frame[request_id] for frame in list(self.frames) if request_id in frame]

    def until_over(self, request_id: str) -> list[dict[str, Any]]:
        give_up = time.monotonic() + 20
        while True:
            events = self.events(request_id)
            if events and ("finish_reason" in events[-1] or "error" in events[-1]):
                return events
            assert time.monotonic() < give_up, events
            time.sleep(0.002)


@contextmanager
def reading(engine: EngineProcess, id: str) -> Iterator[Reader]:
    """A stream that is disconnected at the end."""
    reader = Reader(engine, id)
    try:
        yield reader
    finally:
        reader.cut()


@pytest.fixture(scope="module")
def mock() -> Iterator[EngineProcess]:
    engine = EngineProcess("--step-ms", "2", "--prefill-tokens-per-ms", "0", model="mock")
    yield engine
    engine.kill()


def start(engine: EngineProcess, request_id: str, stream_id: str, **fields: Any) -> Any:
    body = {
        "request_id": request_id, "prompt": PROMPT, "temperature": 0.0, "ignore_eos": True,
        "stream": "mux", "stream_id": stream_id, **fields,
    }  # fmt: skip
    return engine.post("start_generate", **body)


@pytest.mark.processes
def test_events_are_those_of_the_event_stream(engine_process: EngineProcess):
    with reading(engine_process, "one") as reader:
        assert start(engine_process, "a", "one", logprobs=1).json() == {"request_id": "a"}
        muxed = reader.until_over("a")
    alone = engine_process.generate(PROMPT, max_tokens=16, logprobs=1)
    for name in ("token_ids", "logprobs"):
        assert [item for event in muxed for item in event[name]] == [
            item for event in alone for item in event[name]
        ]
    assert "".join(event["text"] for event in muxed) == "".join(event["text"] for event in alone)
    assert muxed[0]["begin"] is not None
    for name in ("finish_reason", "usage"):
        was, now = alone[-1][name], muxed[-1][name]
        if name == "usage":
            was, now = was["completion_tokens"], now["completion_tokens"]
        assert was == now
    engine_process.at_rest()


@pytest.mark.processes
def test_the_events_of_a_step_are_one_frame(mock: EngineProcess):
    with reading(mock, "one") as reader:
        with ThreadPoolExecutor(4) as pool:  # together, or one ends before another begins
            list(pool.map(lambda name: start(mock, name, "one", max_tokens=200), "abcd"))
        whole = {name: reader.until_over(name) for name in "abcd"}
    for events in whole.values():
        assert sum(len(event["token_ids"]) for event in events) == 200
    shared = [frame for frame in reader.frames if len(frame) == 4]
    assert len(shared) > 50
    assert len(reader.frames) < 400
    mock.at_rest()


@pytest.mark.processes
def test_stream_tokens_gathers(mock: EngineProcess):
    with reading(mock, "one") as reader:
        start(mock, "a", "one", max_tokens=25, stream_tokens=10)
        events = reader.until_over("a")
    counts = [len(event["token_ids"]) for event in events]
    assert sum(counts) == 25
    assert all(count >= 10 for count in counts[1:-1])  # more if this test reads slowly
    assert len(counts) <= 4
    assert events[-1]["usage"]["completion_tokens"] == 25


@pytest.mark.processes
def test_the_interval_of_a_stream_batches_its_tokens(mock: EngineProcess):
    began = time.monotonic()
    with reading(mock, "one") as reader:
        for name in "abcd":
            start(mock, name, "one", max_tokens=200, stream_ms=50)
        whole = {name: reader.until_over(name) for name in "abcd"}
    took_s = time.monotonic() - began
    for events in whole.values():
        counts = [len(event["token_ids"]) for event in events]
        assert sum(counts) == 200
        assert counts[0] < 10  # the first event does not wait
        assert len(counts) < 40 + took_s / 0.05  # of 200 steps of 2 ms and more
    # Requests share ticks: the events of four requests do not need four times the frames.
    most = max(len(events) for events in whole.values())
    assert len(reader.frames) < 2 * most
    slow = EngineProcess("--step-ms", "100", model="mock")
    try:
        with reading(slow, "one") as reader:
            start(slow, "a", "one", max_tokens=10, stream_ms=20)
            counts = [len(event["token_ids"]) for event in reader.until_over("a")]
            assert sum(counts) == 10
            assert len(counts) >= 8
    finally:
        slow.kill()


@pytest.mark.processes
def test_losing_the_stream_aborts_its_generations(mock: EngineProcess):
    with reading(mock, "lost") as lost, reading(mock, "kept") as kept:
        start(mock, "a", "lost", max_tokens=10_000)
        start(mock, "b", "kept", max_tokens=100)
        while not lost.events("a"):
            time.sleep(0.001)
        lost.cut()
        assert kept.until_over("b")[-1]["finish_reason"] == "length"
        mock.at_rest()
        refused = start(mock, "c", "lost")
        assert (refused.status_code, refused.json()["error"]["code"]) == (502, "unknown_stream")


@pytest.mark.processes
def test_release_ends_a_generation_and_nothing_else(mock: EngineProcess):
    with reading(mock, "one") as reader:
        for name in "ab":
            start(mock, f"release-{name}", "one", max_tokens=100 if name == "b" else 20_000)
        while not reader.events("release-a"):
            time.sleep(0.001)
        mock.post("release", request_id="release-a")
        assert "released" in reader.until_over("release-a")[-1]["error"]["message"]
        assert reader.until_over("release-b")[-1]["finish_reason"] == "length"
    mock.at_rest()


@pytest.mark.processes
def test_errors_of_the_call_are_http_errors(mock: EngineProcess):
    with reading(mock, "one"):
        again = mock.http.get("/microserving/stream", params={"id": "one"})
        assert (again.status_code, again.json()["error"]["type"]) == (409, "duplicate_request")
        bad = start(mock, "a", "one", prompt=[9999])
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "prompt")
    none = mock.post("start_generate", request_id="x", prompt=PROMPT, stream="mux")
    assert (none.status_code, none.json()["error"]["param"]) == (400, "stream_id")
    assert mock.http.get("/microserving/stream").status_code == 400
    mock.at_rest()


async def test_a_slow_reader_gets_fewer_frames_and_is_then_cut_off(monkeypatch, caplog):
    async with running() as engine:
        mux = engine.muxes.open("slow")
        frames = mux.frames()
        assert await anext(frames) == b"\n"

        async def begin(name: str, tokens: int) -> None:
            mux.subscribe(
                name, await engine.start_generate(generation(PROMPT, name, max_tokens=tokens))
            )

        await begin("a", 40)
        while engine.loop.stats.generation_tokens < 40:  # noqa: ASYNC110  without a reader
            await asyncio.sleep(0.001)
        events: list[dict[str, Any]] = []
        while not events or "finish_reason" not in events[-1]:
            events += json.loads(await anext(frames)).values()
        assert sum(len(event["token_ids"]) for event in events) == 40
        assert len(events) < 5
        monkeypatch.setattr("engine.service.event_mux.MAX_PENDING", 50)
        await begin("b", 400)
        while "too slow" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert [frame async for frame in frames] == []
        with pytest.raises(PeerUnreachable):
            await begin("c", 10)


@pytest.mark.processes
def test_shutdown_ends_the_stream_after_its_last_events():
    engine = EngineProcess("--step-ms", "5", model="mock")
    try:
        reader = Reader(engine, "one")
        start(engine, "a", "one", max_tokens=10_000)
        while not reader.events("a"):
            time.sleep(0.001)
        code, log = engine.stop()
        assert (code, log) == (0, "")
        reader.join()
        assert reader.events("a")[-1]["error"]["type"] == "draining"
    finally:
        engine.kill()

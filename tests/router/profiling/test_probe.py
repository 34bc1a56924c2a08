"""Engines that lie to `microserve profile`, or do not answer it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import Any

import pytest
from raw_server import RawServer

from engine.protocol import ALL_CAPABILITIES, BadRequest, ModelInfo
from router.base import EngineUnreachable
from router.engines import HttpClient
from router.profiling import probe as probing
from router.profiling.measure import _put
from router.profiling.probe import Counters, Probe

NAMES = tuple(probing.COUNTERS)


def metrics(*values: str) -> bytes:
    lines = zip(NAMES, values, strict=False)
    body = "".join(f'{name}{{engine="x"}} {value}\n' for name, value in lines)
    return reply(body.encode())


def reply(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (metrics("NaN", "1", "1", "1"), "/metrics says microserve:steps_total NaN"),
        (metrics("1", "-1", "1", "1"), "/metrics says microserve:step_seconds_total -1"),
        (metrics("1", "inf", "1", "1"), "/metrics says microserve:step_seconds_total inf"),
        (metrics("1", "1", "x" * 900, "1"), "prompt_tokens_total " + "x" * 40),
        (metrics("1", "1", "1"), "it counts no steps"),
        (reply(b"\xff\xfe\n\n {} 1\n"), "it counts no steps"),
        (reply(b"{" * (1 << 20)), "it counts no steps"),
    ],
    ids=[str(number) for number in range(7)],
)
async def test_metrics_that_are_none_are_refused(answer, said):
    async with RawServer(answer, None).serving() as server:
        with pytest.raises(BadRequest) as caught:
            await Probe(HttpClient(server.url)).counters()
    assert caught.value.message.endswith(said)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({}, {}, ""),
        ({"capabilities": ["prep_recv"]}, {}, "http://a:1 does not support remote_send"),
        ({}, {"capabilities": ["remote_send"]}, "http://b:1 does not support prep_recv"),
        ({}, {"fingerprint": "g"}, "http://a:1 and http://b:1 exchange no KV"),
    ],
)
async def test_puts_need_engines_that_exchange_kv(one, other, said):
    probes = [Probe(HttpClient(url)) for url in ("http://a:1", "http://b:1")]
    for probe, fields in zip(probes, (one, other), strict=True):
        whole = {"fingerprint": "f", "capabilities": list(ALL_CAPABILITIES), **fields}
        probe.info = ModelInfo.model_construct(**whole)
    with pytest.raises(BadRequest) if said else nullcontext() as refused:
        probes[0].check_puts(probes[1])
    assert refused is None or refused.value.message == said


async def test_metrics_are_read():
    async with RawServer(metrics("1", "2.5", "3", "4e3"), None).serving() as server:
        assert await Probe(HttpClient(server.url)).counters() == (1.0, 2.5, 3.0, 4000.0)


async def test_metrics_without_end_are_refused():
    endless = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with RawServer(endless, b"10000\r\n" + b"x" * 65536 + b"\r\n").serving() as server:
        with pytest.raises(EngineUnreachable, match="a reply of more than 4194304 bytes"):
            await Probe(HttpClient(server.url)).counters()


def test_counters_that_go_backwards_are_refused():
    with pytest.raises(BadRequest, match="go backwards"):
        Counters(1, 1, 1, 1).since(Counters(1, 1, 2, 1))


async def meet(probe: Probe) -> None:
    await probe.meet()


async def compute(probe: Probe) -> None:
    probe.counters = lambda: _now(Counters(0, 0, 0, 0))  # type: ignore[method-assign]
    await probe.compute([1, 2, 3])


async def decode(probe: Probe) -> None:
    probe.counters = lambda: _now(Counters(0, 0, 0, 0))  # type: ignore[method-assign]
    async with probe.decoding(2, 10, 10):
        pass


async def put(probe: Probe) -> None:
    probe.compute = lambda _: _now(Counters(0, 0, 0, 0))  # type: ignore[method-assign]
    await _put(probe, probe, 16)


async def _now(value: Any) -> Any:
    return value


@pytest.mark.parametrize("ask", [meet, Probe.counters, compute, decode, put])
async def test_an_engine_that_does_not_answer_is_given_up(
    ask: Callable[[Probe], Coroutine[Any, Any, None]], monkeypatch
):
    monkeypatch.setattr(probing, "PATIENCE_S", 0.05)
    async with RawServer(b"").serving() as server:
        client = HttpClient(server.url)
        with pytest.raises(TimeoutError):
            await ask(Probe(client))
        client.close()

"""Which calls the built-in strategies make: on engines that only write them down."""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from engine.protocol import Sampling
from router import Chunk, Request
from strategies.balanced import balanced
from strategies.data_parallel import data_parallel
from strategies.prefill_decode import prefill_decode


class Engine:
    def __init__(self, name, calls, match_len=0):
        self.name, self.calls, self.match_len = name, calls, match_len

    @asynccontextmanager
    async def prep_recv(self, request, *, end):
        self.calls.append((self.name, "prep_recv", end))
        yield SimpleNamespace(match_len=min(self.match_len, end), end=end)
        self.calls.append((self.name, "left"))

    async def remote_send(self, request, kv, *, begin, end):
        self.calls.append((self.name, "remote_send", begin, end))

    async def start_generate(self, request, *, begin=0, kv=None):
        self.calls.append((self.name, "start_generate", begin))
        yield Chunk(token_ids=[1], finish_reason="stop")


def pool(engine):
    return SimpleNamespace(least_loaded=lambda exclude=(): engine, round_robin=lambda: engine)


async def calls_of(strategy, length, *, match_len=0, output=(), **params):
    calls = []
    decode, prefill = Engine("d", calls, match_len), Engine("p", calls)
    cluster = SimpleNamespace(decode=pool(decode), prefill=pool(prefill), engines=pool(decode))
    request = Request("id", list(range(length)), Sampling(), list(output))
    assert len([chunk async for chunk in strategy(request, cluster, **params)]) == 1
    return calls


async def test_data_parallel():
    assert await calls_of(data_parallel, 10) == [("d", "start_generate", 0)]


@pytest.mark.parametrize(
    ("length", "match_len", "output", "end", "send"),
    [
        (100, 0, [], 99, (0, 99)),
        (100, 32, [], 99, (32, 99)),
        (97, 96, [], 96, None),
        (1, 0, [], 0, None),
        (100, 0, [7, 8, 9], 102, (0, 102)),  # resumed: the output is sent as well
    ],
)
async def test_prefill_decode(length, match_len, output, end, send):
    sends = [("p", "remote_send", *send)] if send else []
    assert await calls_of(prefill_decode, length, match_len=match_len, output=output) == [
        ("d", "prep_recv", end), *sends, ("d", "start_generate", end), ("d", "left"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ratio", "end"), [(0.0, 99), (0.1, 90), (0.2, 80), (0.5, 50), (1.0, 0), (0.001, 99)]
)
async def test_balanced(ratio, end):
    sends = [("p", "remote_send", 0, end)] if end else []
    assert await calls_of(balanced, 100, ratio=ratio) == [
        ("d", "prep_recv", end), *sends, ("d", "start_generate", end), ("d", "left"),
    ]  # fmt: skip

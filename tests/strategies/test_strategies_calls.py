"""The calls that the built-in strategies make; the engines here only record them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from engine.protocol import RemoteSendReply, Sampling
from router import Chunk, Request
from strategies.balanced import balanced
from strategies.data_parallel import data_parallel
from strategies.prefill_decode import prefill_decode


class Engine:
    def __init__(self, name, calls, match_len=0):
        self.id = self.name = name
        self.calls, self.match_len = calls, match_len

    def cached(self, request, *, coming):
        return self.match_len

    @asynccontextmanager
    async def prep_recv(self, request, *, end):
        self.calls.append((self.name, "prep_recv", end))
        yield SimpleNamespace(match_len=min(self.match_len, end), end=end)
        self.calls.append((self.name, "left"))

    async def remote_send(self, request, kv, *, begin, end):
        self.calls.append((self.name, "remote_send", begin, end))
        count = end - begin
        return RemoteSendReply(
            sent_tokens=count, cached_tokens=0, computed_tokens=count, bytes=count, ms=1.0
        )

    async def start_generate(self, request, *, begin=0, kv=None):
        self.calls.append((self.name, "start_generate", begin))
        yield Chunk(token_ids=[1], finish_reason="stop")


class Pool(list):
    def able(self, *capabilities):
        return self

    def sending_to(self, receiver):
        return self

    def least_loaded(self, exclude=()):
        return self[0]

    round_robin = least_loaded


async def calls_of(strategy, length, *, match_len=0, cached=0, output=(), **params):
    """Return the calls of a strategy.

    `match_len` tokens are cached by the decode engine, `cached` by the prefill engine.
    """
    calls = []
    decode, prefill = Engine("d", calls, match_len), Engine("p", calls, cached)
    states = {}
    cluster = SimpleNamespace(
        decode=Pool([decode]),
        prefill=Pool([prefill]),
        engines=Pool([decode]),
        state=lambda factory: states.setdefault(factory, factory()),
    )
    request = Request("id", list(range(length)), Sampling(), list(output))
    assert len([chunk async for chunk in strategy.function(request, cluster, **params)]) == 1
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
        (100, 0, [7, 8, 9], 102, (0, 102)),  # resumed: the output is sent too
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


@pytest.mark.parametrize(
    ("length", "match_len", "cached", "end"),
    [
        *(
            (300, 0, 0, 270),
            (300, 32, 0, 273),
            (300, 0, 64, 276),
        ),  # a tenth of the tokens that neither has cached
        *((100, 0, 0, 99), (100, 32, 0, 99), (97, 96, 0, 96), (1, 0, 0, 0)),  # too few to divide
    ],
)
async def test_balanced_auto_divides_what_both_lack(length, match_len, cached, end):
    sends = [("p", "remote_send", match_len, end)] if end > match_len else []
    calls = await calls_of(balanced, length, match_len=match_len, cached=cached, ratio="auto")
    assert calls == [
        ("d", "prep_recv", length - 1), *sends, ("d", "start_generate", end), ("d", "left"),
    ]  # fmt: skip

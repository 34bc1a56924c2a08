"""`QueuedPut` alone: what its callers see when its transport is closed or its device fails."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import pytest

from kvcache.cache import KVCache
from kvcache.errors import Internal
from kvcache.transport.mapped import MappedTarget
from kvcache.transport.put import QueuedPut
from kvcache.transport.worker import Task, Worker
from kvcache.types import TokenPos

Pair = tuple[KVCache, KVCache]
PROMPT = list(range(100, 122))


def open_put(pair: Pair) -> QueuedPut:
    sender, receiver = pair
    _, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    put = sender.open_put(address, PROMPT, 0, 21)
    assert isinstance(put, QueuedPut)
    return put


def test_a_put_of_a_closed_transport_fails_every_future(pair: Pair):
    """Also those that other threads queue while one thread finds the transport closed."""
    put = open_put(pair)
    others: list[Future[None]] = []

    class Closed:
        def submit(self, task: Task) -> None:
            others.append(put.close())
            raise Internal("the transport is closed")

    put._worker = cast(Worker, cast(Any, Closed()))
    for done in (put.close(), *others):
        assert isinstance(done.exception(timeout=5), Internal)
    assert put.failed


def test_a_put_of_a_closed_transport_says_so_in_close_alone(pair: Pair):
    """Steps write, signal and renew: none of them must fail."""
    put = open_put(pair)
    pair[0].transport.close()
    put.write(range(2), [], TokenPos(0), TokenPos(4))
    put.signal(TokenPos(4))
    put.renew()
    assert put.failed
    assert isinstance(put.close().exception(timeout=5), Internal)


def test_a_cancelled_put_ends_if_its_device_has_failed(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """An event that cannot be read would otherwise keep the pages for ever."""
    put = open_put(pair)

    def broken(self: MappedTarget, event: object) -> bool:
        raise RuntimeError("the device has failed")

    monkeypatch.setattr(MappedTarget, "record_event", lambda self: object())
    monkeypatch.setattr(MappedTarget, "event_done", broken)
    put.write(range(2), [], TokenPos(0), TokenPos(4))
    assert isinstance(put.close().exception(timeout=5), Internal)

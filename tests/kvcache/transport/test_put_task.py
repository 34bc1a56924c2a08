"""The task of a `QueuedPut`, call by call: what each call writes and leaves for the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from kv_helpers import pages_of, sequence

from kvcache.cache import KVCache
from kvcache.errors import BadRange, Internal, LeaseExpired
from kvcache.lease import CLAIM, LANDED, NONCE, RENEWALS
from kvcache.transport.put import QueuedPut
from kvcache.transport.target import HostTarget
from kvcache.transport.worker import Task, Worker
from kvcache.types import TokenPos

Pair = tuple[KVCache, KVCache]
PROMPT = list(range(100, 122))


class ByHand:
    """An open put whose task runs in `step` alone, on a device whose work `computed` ends."""

    def __init__(self, pair: Pair) -> None:
        self.sender, self.receiver = pair
        self.lease, address = self.receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
        put = self.sender.open_put(address, PROMPT, 0, 21)
        assert isinstance(put, QueuedPut)
        self.put = put
        self.pages = pages_of(self.sender, sequence(self.sender, 1, PROMPT))
        self.words = self.receiver.transport.region.slots[self.lease.slot]
        self.calls: list[str] = []
        self.tasks: list[Task] = []
        self.asked = 0
        self._computed: set[object] = set()
        self._last: object = None
        self.put._worker = cast(Worker, cast(Any, self))
        target = self.put._target
        for name in ("try_acquire_right", "copy", "store", "release_right"):
            setattr(target, name, self._watched(name, getattr(target, name)))
        self.target = cast(Any, target)

    def _watched(self, name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls.append(name)
            return usual(*args)

        return call

    def submit(self, task: Task) -> None:
        self.tasks.append(task)

    def step(self) -> float | None:
        """Call the task once, and return what it returns."""
        (task,) = self.tasks
        delay = task()
        if delay is None:
            self.tasks.clear()
        return delay

    def steps(self) -> int:
        """Call the task until it ends; return the number of calls."""
        for number in range(1, 100):
            if self.step() is None:
                return number
        pytest.fail("the task does not end")

    def write(self, begin: int, end: int, layers: range = range(2)) -> None:
        self.put.write(layers, self.pages, TokenPos(begin), TokenPos(end))

    def on_device(self) -> None:
        """Let writes wait for the events that `computing` returns."""
        self.target.record_event = lambda: self._last
        self.target.event_done = self._done

    def computing(self) -> object:
        """Return the event that further writes wait for, until `computed`."""
        self._last = object()
        return self._last

    def computed(self, event: object) -> None:
        self._computed.add(event)

    def _done(self, event: object) -> bool:
        self.asked += 1
        assert event is not None
        return event in self._computed

    def landed(self) -> int:
        return int(self.words[LANDED])

    def there(self) -> torch.Tensor:
        """Return which positions hold what the sender holds."""
        ours, theirs = (
            cache.store.pool[:, pages].transpose(2, 3).flatten(1, 2)[:, : len(PROMPT)]
            for cache, pages in ((self.sender, self.pages), (self.receiver, self.lease.own))
        )
        return (ours == theirs).flatten(2).all(dim=2).all(dim=0)


@pytest.fixture
def by_hand(pair: Pair) -> ByHand:
    return ByHand(pair)


def test_the_calls_of_a_step_are_one_task(by_hand: ByHand):
    by_hand.write(0, 4)
    by_hand.put.signal(TokenPos(4))
    by_hand.put.renew()
    done = by_hand.put.close()
    assert len(by_hand.tasks) == 1
    assert by_hand.step() is None
    assert done.done() and not by_hand.put.failed
    assert by_hand.calls == ["try_acquire_right", "copy", "store", "release_right"]
    by_hand.put.renew()  # the task has ended: the next call begins it again
    assert len(by_hand.tasks) == 1


def test_what_follows_a_close_waits_for_the_tasks_next_call(by_hand: ByHand):
    by_hand.put.signal(TokenPos(4))
    first = by_hand.put.close()
    by_hand.put.signal(TokenPos(8))
    second = by_hand.put.close()
    assert by_hand.step() == 0  # at once, but behind other puts
    assert first.done() and not second.done() and by_hand.landed() == 4
    assert by_hand.step() is None
    assert second.done() and by_hand.landed() == 8


def test_each_of_several_closes_in_a_row_is_answered(by_hand: ByHand):
    closes = [by_hand.put.close() for _ in range(3)]
    assert [by_hand.step() for _ in closes] == [0, 0, None]
    assert [done.exception(timeout=0) for done in closes] == [None] * 3
    assert not by_hand.calls


def test_a_write_of_nothing_ends(by_hand: ByHand):
    by_hand.write(5, 5)
    assert by_hand.step() is None
    by_hand.write(21, 21)
    done = by_hand.put.close()
    assert by_hand.step() is None and done.done() and not by_hand.put.failed
    assert not by_hand.calls and by_hand.put.bytes_sent == 0


def test_each_commit_counts_one_renewal(by_hand: ByHand):
    for count in (1, 2, 3):
        by_hand.put.renew()
        assert by_hand.step() is None
        assert int(by_hand.words[RENEWALS]) == count
    assert by_hand.landed() == 0
    by_hand.put.signal(TokenPos(3))
    by_hand.put.renew()
    by_hand.put.signal(TokenPos(7))
    assert by_hand.step() is None
    assert int(by_hand.words[RENEWALS]) == 4 and by_hand.landed() == 7


def test_a_put_may_fill_the_room_but_not_more(by_hand: ByHand):
    by_hand.write(0, 21)
    by_hand.put.signal(TokenPos(21))
    done = by_hand.put.close()
    assert by_hand.step() is None and done.exception(timeout=0) is None
    assert by_hand.landed() == 21 and by_hand.there().tolist() == [True] * 21 + [False]
    by_hand.write(20, 22)
    done = by_hand.put.close()
    assert by_hand.step() is None and isinstance(done.exception(timeout=0), BadRange)


def test_after_a_failure_nothing_more_is_done(by_hand: ByHand):
    """A watermark would rise above positions that were not written."""
    by_hand.put.signal(TokenPos(22))
    first = by_hand.put.close()
    by_hand.put.signal(TokenPos(4))
    by_hand.write(0, 4)
    second = by_hand.put.close()
    assert by_hand.step() is None
    failure = first.exception(timeout=0)
    assert isinstance(failure, BadRange) and second.exception(timeout=0) is failure
    by_hand.put.signal(TokenPos(4))
    assert by_hand.step() is None
    assert by_hand.landed() == 0 and by_hand.put.bytes_sent == 0
    assert "store" not in by_hand.calls and "copy" not in by_hand.calls


def test_after_a_cancel_nothing_more_is_done(by_hand: ByHand):
    by_hand.write(0, 4)
    by_hand.put.signal(TokenPos(4))
    gone, stays = by_hand.put.close(), by_hand.put.close()
    assert gone.cancel()
    by_hand.put.cancel()
    assert by_hand.step() is None
    assert stays.exception(timeout=0) is None and not by_hand.put.failed
    by_hand.put.signal(TokenPos(4))
    done = by_hand.put.close()
    assert by_hand.step() is None and done.exception(timeout=0) is None
    assert by_hand.landed() == 0 and not by_hand.calls


def test_an_unexpected_failure_is_internal(by_hand: ByHand, caplog: pytest.LogCaptureFixture):
    by_hand.target.copy = lambda runs: 1 / 0
    by_hand.write(0, 4)
    by_hand.put.signal(TokenPos(4))
    done = by_hand.put.close()
    assert by_hand.step() is None
    assert isinstance(done.exception(timeout=0), Internal) and by_hand.landed() == 0
    assert "ZeroDivisionError" in caplog.text


def test_the_first_failure_stays_after_the_transport_has_closed(by_hand: ByHand):
    by_hand.put.signal(TokenPos(22))
    assert by_hand.step() is None

    def closed(task: Task) -> None:
        raise Internal("the transport is closed")

    by_hand.submit = closed  # type: ignore[method-assign]
    assert isinstance(by_hand.put.close().exception(timeout=0), BadRange)


@pytest.mark.parametrize("word", [NONCE, CLAIM])
@pytest.mark.parametrize("other", [-1, 1, None])
def test_a_lease_that_is_anothers_is_not_written(by_hand: ByHand, word: int, other: int | None):
    """It has ended, its slot serves another lease, or another sender has claimed it."""
    mine = int(by_hand.words[word])
    by_hand.words[word] = 0 if other is None else mine + other
    by_hand.write(0, 4)
    by_hand.put.signal(TokenPos(4))
    done = by_hand.put.close()
    assert by_hand.step() is None
    assert isinstance(done.exception(timeout=0), LeaseExpired)
    assert by_hand.landed() == 0 and int(by_hand.words[RENEWALS]) == 0
    assert by_hand.calls == ["try_acquire_right", "release_right"]
    by_hand.words[word] = mine


def test_a_lease_that_ends_during_a_copy_keeps_its_watermark(by_hand: ByHand):
    """The sender was stopped within the copy: meanwhile the receiver has ended the lease."""
    nonce, copy = int(by_hand.words[NONCE]), by_hand.target.copy

    def ends(runs: object) -> None:
        copy(runs)
        by_hand.words[NONCE] = 0

    by_hand.target.copy = ends
    by_hand.write(0, 4)
    by_hand.put.signal(TokenPos(4))
    done = by_hand.put.close()
    assert by_hand.step() is None
    assert isinstance(done.exception(timeout=0), LeaseExpired)
    assert by_hand.landed() == 0 and "store" not in by_hand.calls
    by_hand.words[NONCE] = nonce


def test_without_the_right_a_put_lets_others_run_and_loses_nothing(by_hand: ByHand):
    region = by_hand.receiver.transport.region
    assert region.try_acquire_right(by_hand.lease.slot)
    by_hand.write(0, 4)
    by_hand.put.signal(TokenPos(4))
    first = by_hand.put.close()
    assert 0 < (by_hand.step() or 0) < 0.01
    by_hand.write(4, 8)  # queued while the first commit waits
    by_hand.put.signal(TokenPos(8))
    second = by_hand.put.close()
    assert 0 < (by_hand.step() or 0) < 0.1
    assert not first.done() and by_hand.landed() == 0
    region.release_right(by_hand.lease.slot)
    assert by_hand.step() == 0 and first.done() and by_hand.landed() == 4
    assert by_hand.step() is None and second.done() and by_hand.landed() == 8
    assert by_hand.there().tolist() == [True] * 8 + [False] * 14
    assert region.try_acquire_right(by_hand.lease.slot)  # released
    region.release_right(by_hand.lease.slot)


def test_a_write_waits_for_the_device_and_the_writes_before_it_do_not(by_hand: ByHand):
    by_hand.on_device()
    first = by_hand.computing()
    by_hand.write(0, 4)
    by_hand.put.signal(TokenPos(4))
    second = by_hand.computing()
    by_hand.write(4, 8)
    by_hand.put.signal(TokenPos(8))
    done = by_hand.put.close()
    assert 0 < (by_hand.step() or 0) < 0.01  # a layer takes less
    assert not by_hand.calls
    by_hand.computed(first)
    assert by_hand.step() == 0
    assert by_hand.landed() == 4 and by_hand.there().tolist() == [True] * 4 + [False] * 18
    assert 0 < (by_hand.step() or 0) < 0.01
    by_hand.computed(second)
    assert by_hand.step() is None and done.exception(timeout=0) is None
    assert by_hand.landed() == 8


def test_a_close_does_not_wait_for_writes_behind_it(by_hand: ByHand):
    by_hand.on_device()
    by_hand.put.renew()
    done = by_hand.put.close()
    event = by_hand.computing()
    by_hand.write(0, 4)
    assert by_hand.step() == 0 and done.done()
    assert 0 < (by_hand.step() or 0) < 0.01
    by_hand.computed(event)
    assert by_hand.step() is None


def test_an_event_is_not_asked_again_once_it_has_happened(
    by_hand: ByHand, monkeypatch: pytest.MonkeyPatch
):
    limit = 2 * by_hand.sender.layout.layer_bytes
    monkeypatch.setattr(HostTarget, "commit_bytes", limit)
    by_hand.on_device()
    by_hand.computed(by_hand.computing())
    by_hand.write(0, 16)
    assert by_hand.steps() == 4
    assert by_hand.asked == 1


@pytest.mark.parametrize("end", ["fails", "cancelled"])
def test_skipped_writes_end_with_the_devices_last_work(by_hand: ByHand, end: str):
    """Until then the device may still write their pages."""
    by_hand.on_device()
    events = []
    for begin in (0, 4, 8):
        events.append(by_hand.computing())
        by_hand.write(begin, begin + 4)
    done = by_hand.put.close()
    if end == "fails":
        by_hand.words[NONCE] += np.uint64(1)
        by_hand.computed(events[0])
    else:
        by_hand.put.cancel()
    for event in (events[0], events[1]):
        by_hand.computed(event)
        assert 0 < (by_hand.step() or 0) < 0.01
        assert not done.done()
    by_hand.computed(events[2])
    assert by_hand.step() is None
    failure = done.exception(timeout=0)
    assert isinstance(failure, LeaseExpired) if end == "fails" else failure is None
    assert "copy" not in by_hand.calls
    if end == "fails":
        by_hand.words[NONCE] -= np.uint64(1)


def test_a_commit_takes_writes_while_they_fit(by_hand: ByHand, monkeypatch: pytest.MonkeyPatch):
    page = by_hand.sender.layout.page_bytes
    for limit, holds in ((2 * page, 1), (2 * page - 1, 2)):
        monkeypatch.setattr(HostTarget, "commit_bytes", limit)
        by_hand.receiver.store.pool[:, by_hand.lease.own] = 0
        by_hand.calls.clear()
        sent = by_hand.put.bytes_sent
        by_hand.write(0, 4)
        by_hand.write(4, 8)
        by_hand.steps()
        assert by_hand.calls.count("copy") == holds
        assert by_hand.put.bytes_sent - sent == 2 * page
        assert by_hand.there().tolist() == [True] * 8 + [False] * 14

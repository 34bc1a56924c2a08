"""The replicas of one choice: which is the best, and that all are released in the end."""

from __future__ import annotations

import asyncio
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from router.legs.replica import Replica, Replicas


class Releaser:
    """Notes what is released. `wait` waits for `gate`."""

    def __init__(self) -> None:
        self.released: list[tuple[str, str]] = []
        self.waited: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    def spawn(self, backend: Any, body: dict[str, Any], headers: Any) -> Any:
        self.released.append((backend.id, body["lease_id"]))
        return asyncio.ensure_future(asyncio.sleep(0))

    async def wait(self, backend: Any, release: Any) -> None:
        self.waited.append(backend.id)
        await self.gate.wait()
        await release


def engine(id: str, usable: bool = True) -> Any:
    return SimpleNamespace(id=id, usable=usable, replicas={}, mirrored={})


class Choice:
    """The replicas of one choice, whose generation runs on `source`."""

    def __init__(self) -> None:
        self.releaser: Any = Releaser()
        self.replicas = Replicas(self.releaser, {})
        self.source = engine("source")
        self.leg: Any = SimpleNamespace(end=40, tokens=5)
        self.said: list[str] = []

    def add(self, backend: Any, landed: int = 0) -> Replica:
        replica = Replica(
            backend, self.source, self.leg, lease_id=f"lease-{backend.id}", kv_addr="k",
            landed=landed, lost=self.said.append, unwanted=lambda: self.said.append("unwanted"),
        )  # fmt: skip
        self.replicas.add(replica)
        return replica

    def check_none_left(self, *backends: Any) -> None:
        assert not any(backend.replicas for backend in backends) and not self.source.mirrored


async def test_settled_replicas_are_released_but_for_the_best():
    choice = Choice()
    a, b, c, away = engine("a"), engine("b"), engine("c"), engine("away", usable=False)
    async with choice.replicas as replicas:
        choice.add(a, 30)
        best = choice.add(b, 45)
        lost = choice.add(c, 50)
        choice.add(away, 99)  # its engine takes no new work
        lost.lose("lease_expired")
        assert replicas.best() is best
        assert replicas.settle() is best
        assert choice.releaser.released == [("a", "lease-a"), ("away", "lease-away")]
        assert [*b.replicas] == [*choice.source.mirrored] == [best]
        assert replicas._all == [best]
        assert not a.replicas and not c.replicas and not away.replicas
        assert replicas.settle() is best  # again: nothing is released twice
        assert len(choice.releaser.released) == 2
    assert choice.releaser.released[2:] == [("b", "lease-b")]
    assert choice.releaser.waited == ["b"]
    choice.check_none_left(a, b, c, away)
    assert choice.said == ["lease_expired"]


async def test_without_a_usable_replica_all_are_released():
    choice = Choice()
    a, b = engine("a", usable=False), engine("b")
    choice.add(a)
    choice.add(b).forget()  # a generation has taken it over
    assert choice.replicas.settle() is None
    assert choice.releaser.released == [("a", "lease-a")]
    choice.check_none_left(a, b)


@pytest.mark.parametrize("error", [None, KeyError, asyncio.CancelledError])
async def test_the_end_of_the_choice_releases_all(error):
    choice, engines = Choice(), [engine(id) for id in "abc"]

    async def body() -> None:
        async with choice.replicas:
            for one in engines:
                choice.add(one)
            if error is not None:
                raise error

    (result,) = await asyncio.gather(body(), return_exceptions=True)
    assert error is None or isinstance(result, error)
    assert [id for id, _ in choice.releaser.released] == ["a", "b", "c"]
    assert choice.releaser.waited == ["a", "b", "c"]
    choice.check_none_left(*engines)


async def test_all_releases_begin_before_the_first_is_awaited():
    """So cancellation cannot keep one from beginning."""
    choice = Choice()
    choice.releaser.gate.clear()
    for id in "abc":
        choice.add(engine(id))
    closing = asyncio.ensure_future(choice.replicas.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert len(choice.releaser.released) == 3


async def test_a_lost_replica_is_reported_once_and_not_released():
    choice, a = Choice(), engine("a")
    replica = choice.add(a, 10)
    assert replica.lag == 35
    replica.landed = 46  # a report may be ahead of the tokens that have arrived
    assert replica.lag == 0
    replica.unwanted()
    replica.lose("gone")
    replica.lose("gone again")
    replica.unwanted()
    assert choice.said == ["unwanted", "gone"]
    choice.check_none_left(a)
    assert choice.replicas.end(replica) is None
    assert not choice.releaser.released


async def test_a_replica_that_is_over_keeps_nothing_alive():
    class Upkeep:
        def lost(self, reason: str) -> None: ...

    choice, upkeep = Choice(), Upkeep()
    there = weakref.ref(upkeep)
    replica = Replica(
        engine("a"), choice.source, choice.leg, lease_id="l", kv_addr="k", landed=0,
        lost=upkeep.lost, unwanted=lambda upkeep=upkeep: None,
    )  # fmt: skip
    del upkeep
    assert there() is not None
    replica.forget()
    assert there() is None


async def test_a_committed_replica_has_no_lease_to_release():
    choice, a = Choice(), engine("a")
    async with choice.replicas as replicas:
        replica = Replica(
            a, choice.source, choice.leg, lease_id="", kv_addr="", landed=32,
            lost=choice.said.append, unwanted=lambda: None,
        )  # fmt: skip
        replicas.add(replica)
        assert replica.committed and replicas.best() is replica
        assert not choice.add(engine("b"), 16).committed
        assert replicas.settle() is replica
    assert choice.releaser.released == [("b", "lease-b")]
    choice.check_none_left(a)

"""Limits in a store that is slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from router.admission import ANYBODY
from router.agreement import SharedLimits, shared_limits
from router.base import RateLimited
from router.store import MemoryStore, Take, Taken


class SlowStore(MemoryStore):
    """A store that can be stopped."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop().time)
        self.running, self.asked = asyncio.Event(), 0
        self.running.set()

    async def take(self, takes: list[Take]) -> Taken:
        self.asked += 1
        await self.running.wait()
        return await super().take(takes)


@pytest.fixture
async def tasks() -> AsyncIterator[asyncio.TaskGroup]:
    async with asyncio.TaskGroup() as group:
        yield group


async def test_a_slow_store_holds_a_request_up_once(
    tasks: asyncio.TaskGroup, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shared_limits, "TAKE_S", 0.05)
    monkeypatch.setattr(shared_limits, "AGAIN_S", 1.0)
    store, clock = SlowStore(), asyncio.get_running_loop().time
    limits = SharedLimits(40, 0, clock, store=store, routers=lambda: 4, tasks=tasks)
    await limits.arrive(ANYBODY)
    store.running.clear()
    began, admitted = clock(), 0
    with pytest.raises(RateLimited):
        while True:
            await limits.arrive(ANYBODY)
            admitted += 1
    assert (admitted, store.asked) == (10, 2)  # its share; the store is not asked meanwhile
    assert clock() - began < 1.0
    store.running.set()
    await asyncio.sleep(1.05)
    await limits.arrive(ANYBODY)
    assert store.asked == 3
    limits.close()

"""The poller for waiting calls; `test_service` covers that they get their KV."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from engine_helpers import generate, prep, running, sending, start

from engine.protocol import LeaseExpired, Release
from engine.service.engine import MicroserveEngine
from kvcache.lease.table import Watch
from kvcache.transport import MemoryNetwork

PROMPT = [(11 * n) % 250 for n in range(40)]


class Polls:
    """Counts how often watermarks are read, and for how many leases at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        read = Watch.read

        def counted(watch: Watch) -> Any:
            landed, live = read(watch)
            self.sizes.append(len(landed))
            return landed, live

        monkeypatch.setattr(Watch, "read", counted)


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> Polls:
    return Polls(monkeypatch)


async def wait_for_kv(engine: MicroserveEngine, count: int) -> list[asyncio.Task[Any]]:
    """Start `count` generations on leases whose KV never arrives."""
    tasks = []
    for number in range(count):
        got = engine.prep_recv(prep([number, *PROMPT[:8]], 8, f"r{number}"))
        call = start([number, *PROMPT[:8]], f"r{number}", begin=8, lease_id=got.lease_id)
        tasks.append(asyncio.create_task(engine.start_generate(call)))
    return tasks


async def test_all_waiters_and_no_other_leases_are_read_in_one_operation(polls: Polls):
    async with running(pages=128, max_live=128) as engine:
        await asyncio.sleep(0.02)
        assert polls.sizes == []  # no call waits
        tasks = await wait_for_kv(engine, 50)
        await asyncio.sleep(0.05)
        assert set(polls.sizes) == {50}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.005)  # the timer fires for the last time
        polls.sizes.clear()
        await asyncio.sleep(0.02)
        assert polls.sizes == []
        for number in range(50):
            engine.release(Release(request_id=f"r{number}"))


async def test_only_waiters_with_their_kv_are_woken(polls: Polls):
    network = MemoryNetwork()
    async with running(network) as engine, running(network, name="p") as prefill:
        others = await wait_for_kv(engine, 3)
        got = engine.prep_recv(prep(PROMPT, 39))
        tokens = asyncio.create_task(
            generate(engine, PROMPT, begin=39, lease_id=got.lease_id, max_tokens=4)
        )
        await asyncio.sleep(0.005)
        assert not tokens.done()
        await prefill.remote_send(sending(PROMPT, 0, 39, got.kv_addr))
        assert len(await tokens) == 4
        assert engine.waiting == 3 and not any(task.done() for task in others)
        for number in range(3):  # the end of a lease wakes its own waiter only
            engine.release(Release(request_id=f"r{number}"))
            with pytest.raises(LeaseExpired):
                await asyncio.wait_for(others[number], 10.0)
            assert engine.waiting == 2 - number

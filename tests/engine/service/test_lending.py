"""The calls about lent pages, and generations that need these pages."""

from __future__ import annotations

import asyncio

import pytest
from engine_helpers import collect, generate, prep, running, sending, start

from engine.protocol import (
    BadRequest,
    Draining,
    LendAllocate,
    LendAllocateReply,
    LendFree,
    LendRenew,
    NoCapacity,
    Release,
    StaleEpoch,
)
from engine.service import Lending, MicroserveEngine
from kvcache.lease import KVAddress
from kvcache.transport import MemoryNetwork

PROMPT = [(7 * n) % 250 for n in range(40)]


def lending_of(engine: MicroserveEngine) -> Lending:
    return Lending(engine.cache, lambda: engine.draining)


def ask(lending: Lending, lease_id: str, size: int, **fields: object) -> LendAllocateReply:
    values = {"debtor": "d", "epoch": 1, "creditor_epoch": 1, **fields}
    return lending.allocate(LendAllocate(lease_id=lease_id, size=size, **values))  # type: ignore[arg-type]


def free(lending: Lending, lease_id: str) -> int:
    call = LendFree(debtor="d", epoch=1, creditor_epoch=1, lease_id=lease_id)
    return lending.free(call).freed_pages


def renew(lending: Lending, *lease_ids: str) -> tuple[list[str], list[str], list[str]]:
    call = LendRenew(debtor="d", epoch=1, creditor_epoch=1, lease_ids=list(lease_ids))
    reply = lending.renew(call)
    return reply.renewed, reply.called_back, reply.ended


async def test_an_engine_lends_up_to_its_share_and_says_so():
    async with running(pages=16, lend_pages=8, loan_s=9.0) as engine:
        lending = lending_of(engine)
        reply = ask(lending, "1", 6)
        assert reply.granted and reply.lease_ms == 9000 and reply.kv_addr is not None
        assert len(KVAddress.verify(reply.kv_addr, b"secret").pages()) == 6
        assert ask(lending, "1", 6) == reply
        refused = ask(lending, "2", 3)
        assert (refused.granted, refused.kv_addr) == (False, None)
        first, second = lending.heartbeat(), lending.heartbeat()
        assert first is not None and second is not None
        assert (first.available, first.lent, first.borrowed) == (2, {"d": 6}, {})
        assert (first.instance, first.epoch) == ("a", 1) and second.sequence > first.sequence
        assert renew(lending, "1", "2") == (["1"], [], ["2"])
        assert free(lending, "1") == 6 and free(lending, "1") == 0
        assert renew(lending, "1") == ([], [], ["1"])


async def test_an_engine_without_a_share_lends_nothing_and_tells_nothing():
    async with running() as engine:
        lending = lending_of(engine)
        assert not ask(lending, "1", 1).granted
        assert lending.heartbeat() is None


async def test_bad_calls_change_nothing():
    async with running(pages=16, lend_pages=8) as engine:
        lending = lending_of(engine)
        with pytest.raises(BadRequest, match="itself"):
            ask(lending, "1", 1, debtor="a")
        with pytest.raises(StaleEpoch):
            ask(lending, "1", 1, creditor_epoch=2)
        ask(lending, "1", 1)
        with pytest.raises(BadRequest):
            ask(lending, "1", 2)
        assert free(lending, "1") == 1


async def test_a_draining_engine_lends_nothing_more_and_takes_pages_back():
    async with running(pages=16, lend_pages=8) as engine:
        lending = lending_of(engine)
        ask(lending, "1", 1)
        engine.draining = True
        with pytest.raises(Draining):
            ask(lending, "2", 1)
        told = lending.heartbeat()
        assert told is not None and told.available == 0
        assert renew(lending, "1") == (["1"], [], [])
        assert free(lending, "1") == 1


async def test_a_generation_that_needs_lent_pages_gets_them_and_its_tokens_are_the_same():
    async with running() as engine:
        expected = await generate(engine, PROMPT, max_tokens=60)
    async with running(pages=8, lend_pages=4) as engine:  # the generation takes 7
        lending = lending_of(engine)
        ask(lending, "1", 4)
        stream = await engine.start_generate(start(PROMPT, max_tokens=60))
        async with asyncio.timeout(10):
            while renew(lending, "1") != ([], ["1"], []):  # noqa: ASYNC110  the debtor polls
                await asyncio.sleep(0.01)
        assert not ask(lending, "2", 1).granted  # nothing else, while a loan is called back
        free(lending, "1")
        tokens = [token for event in await collect(stream) for token in event.token_ids]
        assert tokens == expected


async def test_a_send_without_room_calls_loans_back():
    network = MemoryNetwork()
    async with (
        running(network, pages=8, lend_pages=4) as engine,
        running(network, name="receiver") as receiver,
    ):
        lending, prompt = lending_of(engine), [(3 * n) % 250 for n in range(100)]  # seven pages
        ask(lending, "1", 4)
        lease = receiver.prep_recv(prep(prompt, 99))
        with pytest.raises(NoCapacity):
            await engine.remote_send(sending(prompt, 0, 99, lease.kv_addr))
        assert renew(lending, "1") == ([], ["1"], [])
        free(lending, "1")
        reply = await engine.remote_send(sending(prompt, 0, 99, lease.kv_addr))
        assert reply.sent_tokens == 99
        receiver.release(Release(lease_id=lease.lease_id))


async def test_a_generation_outwaits_a_silent_debtor():
    async with running(pages=8, lend_pages=4, loan_s=0.3) as engine:
        ask(lending_of(engine), "1", 4)
        assert len(await generate(engine, PROMPT, max_tokens=60)) == 60
        assert engine.cache.page_use().lent == 0

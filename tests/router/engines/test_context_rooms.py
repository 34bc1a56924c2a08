"""Which engines get a context that outgrows their pools, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from stub_engine import PAGES, StubEngine
from test_creditor_lists import BORROWS
from test_ledger_feed import CHECK_S, Fleet, Lender, fleet
from virtual_time import in_virtual_time

from engine.protocol import NoCapacity

BLOCK = 8  # pages of the stubs; 128 tokens


class Borrower(Lender):
    """An engine that borrows, with a pool of `pages` pages."""

    def __init__(self, id: str, pages: int, available: int = 0, **fields: Any) -> None:
        super().__init__(id, available, **fields)
        self.tells["borrowing"] = BORROWS
        self.tells["pages"] = dict.fromkeys(PAGES, 0) | {"total": pages}

    async def set_creditors(self, body: dict[str, Any], headers: object) -> None:
        pass


def chosen(f: Fleet, tokens: int) -> list[str]:
    return [backend.id for backend in f.registry.usable(filling=tokens)]


def short(f: Fleet, tokens: int) -> bool:
    return f.registry.rooms.short(f.registry.usable(filling=tokens), tokens)


@in_virtual_time
async def test_a_context_goes_where_own_pool_and_borrowed_blocks_hold_it():
    small, large = Borrower("small", 32), Borrower("large", 64, 2 * BLOCK, most=4 * BLOCK)
    lender = Lender("lender", 3 * BLOCK + 5, most=10 * BLOCK)
    async with fleet(small, large, lender, StubEngine("plain")) as f:
        await asyncio.sleep(CHECK_S)
        everybody = ["small", "large", "lender", "plain"]
        assert chosen(f, 0) == chosen(f, 32 * 16) == everybody
        # Those that do not borrow hold all that their context admits. The others: 32 pages and
        # 2 + 3 blocks, 64 pages and 3 blocks.
        assert chosen(f, 32 * 16 + 5 * 128) == everybody
        assert chosen(f, 32 * 16 + 5 * 128 + 1) == ["large", "lender", "plain"]
        assert chosen(f, 64 * 16 + 3 * 128 + 1) == ["lender", "plain"]
        for name in ("lender", "plain"):
            f.registry.drain(f.registry[name], True)
        # Now the lender lends nothing further.
        assert chosen(f, 32 * 16 + 2 * 128) == ["small", "large"]
        assert chosen(f, 32 * 16 + 2 * 128 + 1) == ["large"]


@in_virtual_time
async def test_what_may_come_free_is_waited_for_and_what_never_will_is_refused():
    a = Borrower("a", 32)
    lender = Lender("lender", 2 * BLOCK, most=10 * BLOCK, lent={"x": 8 * BLOCK})
    async with fleet(a, lender) as f:
        await asyncio.sleep(CHECK_S)
        f.registry["lender"].draining = False
        now, ever = 32 * 16 + 2 * 128, 32 * 16 + 10 * 128
        only = [f.registry["a"]]
        rooms = f.registry.rooms
        assert rooms.narrow(only, now) == only and not rooms.short(only, now)
        assert rooms.narrow(only, ever) == only and rooms.short(only, ever)
        assert rooms.narrow(only, ever + 1) == []
        assert rooms.shortage(ever + 1) == (
            "no engine has room for 1793 tokens; a holds 512, and 1792 with all that others lend"
        )
        lender.heartbeat["most"] = None  # an engine of another version: who knows
        await asyncio.sleep(CHECK_S)
        assert rooms.narrow(only, 10 * ever) == only and rooms.short(only, 10 * ever)


@in_virtual_time
async def test_contexts_that_have_begun_keep_the_blocks_that_they_lack_yet():
    a, b, lender = Borrower("a", 32), Borrower("b", 32), Lender("lender", 10 * BLOCK)
    async with fleet(a, b, lender) as f:
        await asyncio.sleep(CHECK_S)
        f.registry.drain(f.registry["lender"], False)
        rooms, backends = f.registry.rooms, [f.registry["a"], f.registry["b"]]
        one = 32 * 16 + 6 * 128
        assert rooms.narrow(backends, one) == backends and not rooms.short(backends, one)
        backends[0].load.contexts += one
        assert rooms.short(backends, one)  # 4 blocks are left
        less = 32 * 16 + 4 * 128
        assert rooms.narrow(backends, less) == backends[1:]
        # It has borrowed 5 of them, which the creditor's heartbeat shows too.
        a.heartbeat["borrowed"] = {"lender": 5 * BLOCK}
        lender.heartbeat.update(available=5 * BLOCK, lent={"a": 5 * BLOCK})
        await asyncio.sleep(CHECK_S)
        assert rooms.narrow(backends, less) == backends[1:]
        assert rooms.short(backends, less + 1)
        backends[0].load.contexts -= one
        assert rooms.narrow(backends, less + 1) == backends


@in_virtual_time
async def test_waiters_go_in_the_order_of_their_arrival_and_fail_at_their_deadline():
    a, lender = Borrower("a", 32), Lender("lender", 0, most=9 * BLOCK)
    async with fleet(a, lender, max_queue=2) as f, asyncio.TaskGroup() as tasks:
        await asyncio.sleep(CHECK_S)
        registry, done = f.registry, []
        now = asyncio.get_running_loop().time
        only = [registry["a"]]

        async def wait(name: str, blocks: int, within_s: float = 60.0) -> None:
            tokens = 32 * 16 + 128 * blocks
            assert registry.rooms.short(only, tokens)
            await registry.rooms.wait(lambda: only, tokens, now() + within_s)
            only[0].load.contexts += tokens
            done.append(name)

        first = tasks.create_task(wait("first", 6))
        await asyncio.sleep(0)
        tasks.create_task(wait("second", 2))
        await asyncio.sleep(0)
        with pytest.raises(NoCapacity, match="2 long requests are waiting"):
            await wait("third", 1)
        lender.heartbeat["available"] = 3 * BLOCK  # enough for the second one
        await asyncio.sleep(2 * CHECK_S)
        assert done == []
        lender.heartbeat["available"] = 8 * BLOCK
        await asyncio.sleep(2 * CHECK_S)
        assert done == ["first"] and first.done()
        only[0].load.contexts = 0  # it has ended
        await asyncio.sleep(2 * CHECK_S)
        assert done == ["first", "second"]
        with pytest.raises(NoCapacity, match="others lend too little for 1408 tokens now; a holds"):
            await wait("late", 7, 0.2)


@in_virtual_time
async def test_pages_that_a_context_is_about_to_fill_are_lent_to_nobody():
    """Its engine still says that they are available: it holds none yet."""
    a, b = (Borrower(name, 32, 3 * BLOCK, most=4 * BLOCK) for name in ("a", "b"))
    async with fleet(a, b) as f:
        await asyncio.sleep(CHECK_S)
        rooms, backends = f.registry.rooms, [f.registry["a"], f.registry["b"]]
        one = 32 * 16 + 2 * 128
        assert rooms.narrow(backends, one) == backends and not rooms.short(backends, one)
        backends[0].load.contexts += one
        assert rooms.short(backends, one)
        backends[0].load.contexts -= one
        assert not rooms.short(backends, one)


@in_virtual_time
async def test_those_that_wait_are_let_in_one_at_a_time():
    """What the first one takes is counted when its generation begins, a moment later."""
    a, lender = Borrower("a", 32), Lender("lender", 0, most=9 * BLOCK)
    async with fleet(a, lender) as f, asyncio.TaskGroup() as tasks:
        await asyncio.sleep(CHECK_S)
        only, let_in = [f.registry["a"]], []
        tokens = 32 * 16 + 6 * 128

        async def run(name: str) -> None:
            await f.registry.rooms.wait(lambda: only, tokens, 1e9)
            let_in.append(name)
            await asyncio.sleep(0.05)
            with only[0].load.work(streams=1):
                only[0].load.contexts += tokens
                await asyncio.sleep(10)
                only[0].load.contexts -= tokens

        for name in ("first", "second"):
            tasks.create_task(run(name))
        await asyncio.sleep(0)
        lender.heartbeat["available"] = 8 * BLOCK
        await asyncio.sleep(4 * CHECK_S)
        assert let_in == ["first"]
        await asyncio.sleep(12)
        assert let_in == ["first", "second"]


@in_virtual_time
async def test_nobody_waits_for_engines_that_have_gone():
    a, lender = Borrower("a", 32), Lender("lender", 0)
    async with fleet(a, lender) as f:
        await asyncio.sleep(CHECK_S)
        only = [f.registry["a"]]
        waiting = asyncio.create_task(f.registry.rooms.wait(lambda: only, 999, 1e9))
        await asyncio.sleep(CHECK_S)
        assert not waiting.done()
        only.clear()
        await asyncio.sleep(CHECK_S)
        assert waiting.done()
        await waiting

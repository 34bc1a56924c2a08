"""When debtors are told whom to ask, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

from stub_engine import StubEngine
from test_ledger_feed import CHECK_S, Lender, fleet
from virtual_time import in_virtual_time

from router.base import EngineUnreachable
from router.ledger.creditor_lists import REPEAT_S, SEND_S

BORROWS = {"creditors": [], "loans": 0, "free_blocks": 0, "refusals": 0, "lost_loans": 0}


class DebtorStub(StubEngine):
    """An engine that borrows, and the lists that it has got."""

    def __init__(self, id: str = "d", **tells: Any) -> None:
        super().__init__(id, borrowing=BORROWS, **tells)
        self.lists: list[list[str]] = []
        self.bodies: list[dict[str, Any]] = []

    async def set_creditors(self, body: dict[str, Any], headers: object) -> None:
        await self._ask("set_creditors")
        self.bodies.append(body)
        self.lists.append([each["instance"] for each in body["creditors"]])


@in_virtual_time
async def test_a_list_is_sent_when_it_changes_and_again_after_a_while():
    d, a, b = DebtorStub(), Lender("a", 8), Lender("b", 20, epoch=3)
    async with fleet(d, a, b):
        await asyncio.sleep(CHECK_S)
        assert d.lists[-1] == ["b", "a"]
        assert d.bodies[-1]["creditors"][0] == {
            "instance": "b", "epoch": 3, "url": "http://b:1", "available": 20,
        }  # fmt: skip
        sent = len(d.lists)
        await asyncio.sleep(3 * REPEAT_S)
        assert 2 <= len(d.lists) - sent <= 3
        a.heartbeat["available"] = 30
        await asyncio.sleep(CHECK_S)
        assert d.lists[-1] == ["a", "b"]
        a.heartbeat["available"] = 7  # less than a block
        await asyncio.sleep(CHECK_S)
        assert d.lists[-1] == ["b"]


@in_virtual_time
async def test_three_creditors_at_most_and_only_those_with_the_same_kv_and_secret():
    lenders = [Lender(name, 10 + n) for n, name in enumerate(["a", "b", "c", "d2", "e"])]
    lenders[4].tells["secret_digest"] = "other"
    d = DebtorStub(secret_digest="same")
    async with fleet(d, *lenders):
        await asyncio.sleep(CHECK_S)
        assert d.lists[-1] == ["d2", "c", "b"]


@in_virtual_time
async def test_creditors_on_the_debtors_host_come_first():
    d, near, far = DebtorStub(), Lender("near", 8), Lender("far", 99)
    d.url, near.url, far.url = "http://one:1", "http://one:2", "http://other:1"
    async with fleet(d, near, far):
        await asyncio.sleep(CHECK_S)
        assert d.lists[-1] == ["near", "far"]
        near.heartbeat["available"] = 7  # less than a block
        await asyncio.sleep(CHECK_S)
        assert d.lists[-1] == ["far"]


@in_virtual_time
async def test_a_lost_creditor_is_struck_off_at_once_and_a_new_process_is_named():
    d, a = DebtorStub(), Lender("a", 8)
    async with fleet(d, a) as f:
        await asyncio.sleep(CHECK_S)
        assert d.lists[-1] == ["a"]
        f.registry.remove(f.registry["a"])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert d.lists[-1] == []


@in_virtual_time
async def test_a_debtor_that_fails_or_hangs_is_told_later_and_delays_no_other():
    d, e, a = DebtorStub(), DebtorStub("e"), Lender("a", 8)

    async def refuse() -> None:
        raise EngineUnreachable("gone")

    d.does["set_creditors"] = refuse
    async with fleet(d, e, a) as f:
        await asyncio.sleep(CHECK_S)
        assert not d.lists and e.lists[-1] == ["a"]
        assert f.registry["d"].status == "up"
        d.does["set_creditors"] = asyncio.Event().wait
        await asyncio.sleep(SEND_S + CHECK_S)
        del d.does["set_creditors"]
        await asyncio.sleep(SEND_S + 2 * CHECK_S)
        assert d.lists[-1] == ["a"]


@in_virtual_time
async def test_nobody_else_is_told():
    a, plain = Lender("a", 8), StubEngine("p")  # a call would raise: they have no such method
    d = DebtorStub(page_size=0)  # a lying engine harms only itself
    async with fleet(a, plain, d) as f:
        await asyncio.sleep(2 * REPEAT_S)
        assert {backend.status for backend in f.registry} == {"up"}

"""Which attempts a drained engine's leave, and when a replica is good enough to continue from."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from engine.protocol import Sampling
from router.base.errors import Moved
from router.base.request import Request
from router.execution import relocation as module
from router.execution.relocation import Relocations, relocated
from router.legs import MirrorPlan


class Attempts:
    """Attempts that run until they are moved."""

    def __init__(self) -> None:
        self.relocations = Relocations()
        self.legs: list[Any] = []  # of one receipt
        self.moved: list[str] = []
        self.others: list[str] = []  # engines that can take them

    async def run(self, id: str, call: str, engine: str) -> None:
        receipt = SimpleNamespace(legs=self.legs)
        registry = SimpleNamespace(usable=lambda **_: self.others)
        runtime = SimpleNamespace(registry=registry)
        attempt = type(
            "Attempt", (), {"request_id": id, "receipt": receipt, "runtime": runtime, "needs": None}
        )()
        self.legs.append(SimpleNamespace(engine=engine, request_id=id, call=call))
        try:
            with self.relocations.movable(attempt):
                await asyncio.Event().wait()
        except Moved:
            self.moved.append(id)


async def test_only_attempts_that_generate_on_the_engine_leave_it():
    attempts = Attempts()
    tasks = [
        asyncio.ensure_future(attempts.run(id, call, engine))
        for id, call, engine in (
            ("generates", "start_generate", "a"), ("prepares", "prep_recv", "a"),
            ("sends", "remote_send", "a"), ("pins", "pin", "a"),
            ("elsewhere", "start_generate", "b"),
        )
    ]  # fmt: skip
    await asyncio.sleep(0)
    a: Any = SimpleNamespace(id="a")
    assert attempts.relocations.leave(a) == 0  # there is nowhere to go
    attempts.others.append("b")
    assert attempts.relocations.leave(a) == 2
    assert attempts.relocations.leave(a) == 0  # they are leaving already
    for _ in range(3):
        await asyncio.sleep(0)
    assert attempts.moved == ["generates", "prepares"]
    assert len(attempts.relocations._running) == 3
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert attempts.moved == ["generates", "prepares"]  # a cancellation is no move
    assert not attempts.relocations._running


@pytest.mark.parametrize(("lacks", "resumes"), [(0, True), (9, True), (10, False)])
async def test_a_replica_may_lag_by_two_intervals(monkeypatch, lacks: int, resumes: bool):
    """It lags by one while it is written, and the last token has no KV yet."""
    where: list[str] = []

    class Engine:
        def __init__(self, name: str) -> None:
            self.name = name

        async def resume(self, *args: Any, **kwargs: Any):
            where.append(self.name)
            yield "chunk"

    old = SimpleNamespace(name="old", usable=True)
    monkeypatch.setattr(module, "Engine", lambda attempt, backend: Engine(backend.name))
    request = Request("x", list(range(40)), Sampling(), output=[1, 2])
    kv = SimpleNamespace(match_len=42 - lacks, engine=Engine("replica"))
    origin: Any = SimpleNamespace(mirror=MirrorPlan(4), backend=old)
    attempt: Any = SimpleNamespace(alone=True)
    cluster: Any = SimpleNamespace(replica=kv)
    assert [chunk async for chunk in relocated(attempt, cluster, request, origin)] == ["chunk"]
    assert where == ["replica" if resumes else "old"]
    assert attempt.alone is False

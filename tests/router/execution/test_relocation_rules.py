"""Which attempts a drained engine's leave, and when a replica is good enough to continue from."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from engine.protocol import Sampling
from router.base.errors import Moved
from router.base.request import Request
from router.execution import relocation as module
from router.execution.relocation import Relocations, relocated
from router.legs import MirrorPlan


def named(name: str) -> str:
    """Return an equal string that is another object, as one that was read from a reply."""
    return "".join(["x", name])[1:]


class Attempts:
    """Attempts that run until they are moved."""

    def __init__(self) -> None:
        self.relocations = Relocations()
        self.legs: list[Any] = []  # of one receipt
        self.moved: list[str] = []
        self.others: list[str] = []  # engines that can take them
        self.needs: list[int] = []  # tokens that they were asked to hold

    async def run(self, id: str, call: str, engine: str) -> None:
        receipt = SimpleNamespace(legs=self.legs)
        registry = SimpleNamespace(usable=self._usable)
        runtime = SimpleNamespace(registry=registry)
        attempt = type(
            "Attempt", (), {"request_id": id, "receipt": receipt, "runtime": runtime, "needs": 70}
        )()
        leg = {"engine": named(engine), "request_id": named(id), "call": call}
        self.legs.append(SimpleNamespace(**leg))
        try:
            with self.relocations.movable(attempt):
                await asyncio.Event().wait()
        except Moved:
            self.moved.append(id)

    def _usable(self, *, holding: int) -> list[str]:
        self.needs.append(holding)
        return self.others


async def test_only_attempts_that_generate_on_the_engine_leave_it():
    attempts = Attempts()
    tasks = [
        asyncio.ensure_future(attempts.run(id, call, engine))
        for id, call, engine in (
            ("generates", "start_generate", "e-1"), ("prepares", "prep_recv", "e-1"),
            ("sends", "remote_send", "e-1"), ("pins", "pin", "e-1"),
            ("before", "start_generate", "e-0"), ("elsewhere", "start_generate", "e-2"),
        )
    ]  # fmt: skip
    await asyncio.sleep(0)
    drained: Any = SimpleNamespace(id="e-1")
    assert attempts.relocations.leave(drained) == 0  # there is nowhere to go
    attempts.others.append("e-2")
    assert attempts.relocations.leave(drained) == 2
    assert attempts.relocations.leave(drained) == 0  # they are leaving already
    for _ in range(3):
        await asyncio.sleep(0)
    assert attempts.moved == ["generates", "prepares"]
    assert len(attempts.relocations._running) == 4
    assert set(attempts.needs) == {70}
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


class Moving:
    """A generation that leaves `old` for `new`, and the calls that move it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokens: int, match_len: int = 0) -> None:
        self.calls: list[Any] = []
        self.mirror = MirrorPlan(4)
        self.request = Request("x", list(range(tokens - 2)), Sampling(), output=[1, 2])
        self.kv = SimpleNamespace(match_len=match_len)
        self.backend = SimpleNamespace(name="old", usable=False, page_size=16)
        self.origin: Any = SimpleNamespace(mirror=self.mirror, backend=self.backend)
        moving = self

        class Engine:
            def __init__(self, name: str) -> None:
                self.name = name

            def receiving_from(self, sender: Any) -> Engine:
                assert sender.name == "old"
                return self

            def least_loaded(self, *, exclude: Any) -> Engine:
                assert exclude.name == "old"
                return self

            @asynccontextmanager
            async def prep_recv(self, request: Request, *, end: int):
                moving.calls.append((self.name, "prep_recv", end))
                yield moving.kv
                moving.calls.append((self.name, "released"))

            async def remote_send(self, request: Request, kv: Any, *, begin: int, end: int):
                assert (request, kv) == (moving.request, moving.kv)
                moving.calls.append((self.name, "remote_send", begin, end))

            async def resume(self, request: Any, mirror: Any, *, begin: int = 0, kv: Any = None):
                assert (request, mirror) == (moving.request, moving.mirror)
                assert kv is (moving.kv if self.name == "new" else None)
                moving.calls.append((self.name, "resume", begin))
                for number in range(3):
                    yield number

        monkeypatch.setattr(module, "Engine", lambda attempt, backend: Engine(backend.name))
        self.attempt: Any = SimpleNamespace(alone=True)
        self.cluster: Any = SimpleNamespace(replica=None, decode=Engine("new"))

    async def move(self) -> None:
        moved = relocated(self.attempt, self.cluster, self.request, self.origin)
        assert [number async for number in moved] == [0, 1, 2]
        assert self.attempt.alone is False  # the old engine takes part


@pytest.mark.parametrize(
    ("tokens", "match_len", "end", "sends"),
    [
        (16, 0, 0, False),  # the last token is always computed
        (17, 0, 16, True),
        (32, 0, 16, True),
        (33, 0, 32, True),
        (33, 16, 32, True),
        (33, 32, 32, False),
        (47, 0, 32, True),
    ],
)
async def test_the_old_engine_sends_full_pages(monkeypatch, tokens, match_len, end, sends):
    moving = Moving(monkeypatch, tokens, match_len)
    await moving.move()
    assert moving.calls == [
        ("new", "prep_recv", end),
        *([("old", "remote_send", match_len, end)] if sends else []),
        ("new", "resume", end),
        ("new", "released"),
    ]


@pytest.mark.parametrize("mirrored", [False, True])
async def test_an_engine_that_is_up_again_goes_on_itself(monkeypatch, mirrored):
    moving = Moving(monkeypatch, 40)
    moving.backend.usable = True
    if not mirrored:
        moving.origin.mirror = moving.mirror = None
        moving.cluster.replica = moving.kv  # another generation's: this one asked for none
    await moving.move()
    assert moving.calls == [("old", "resume", 0)]

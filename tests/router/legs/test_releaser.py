"""Releases reach engines that were silent for a while."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until

from engine.protocol import UnknownLease
from router.base import EngineUnreachable, NobodyListens, OutOfFiles
from router.legs import releaser as module
from router.legs.releaser import Releaser


class Engine:
    """An engine whose next calls fail with `errors`; `None` is a call that gets no answer."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors = list(errors)
        self.told: list[Any] = []
        self.client = self
        self.id = "a"
        self.status = "up"
        self.state = SimpleNamespace(epoch=1)

    async def release(self, body: Any, headers: Any) -> None:
        self.told.append(body)
        if self.errors:
            if (error := self.errors.pop(0)) is None:
                await asyncio.Event().wait()
            raise error


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.001)


BODY = {"lease_id": "l"}


@pytest.mark.parametrize(
    "missed", [None, EngineUnreachable("it closed the connection"), OutOfFiles("no more files")]
)
async def test_a_release_without_an_answer_is_repeated(missed: Exception | None):
    engine: Any = Engine(missed, missed)
    engine.status = "down"
    async with asyncio.TaskGroup() as tasks:
        releaser = Releaser(tasks, 0.01)
        await releaser.spawn(engine, BODY, {})
        await asyncio.sleep(0.01)
        assert engine.told == [BODY]  # it is not repeated while the engine is down
        engine.status = "up"
        await until(lambda: len(engine.told) == 3)
    assert engine.told == [BODY] * 3


@pytest.mark.parametrize("error", [NobodyListens("refused"), UnknownLease("no such lease")])
async def test_an_answer_or_a_dead_process_needs_no_repetition(error: Exception):
    engine: Any = Engine(error)
    async with asyncio.TaskGroup() as tasks:
        releaser = Releaser(tasks, 0.01)
        releaser.spawn(engine, BODY, {})
    assert engine.told == [BODY]


@pytest.mark.parametrize("end", ["closed", "restarted", "old"])
async def test_repetitions_end(end: str, monkeypatch: pytest.MonkeyPatch):
    engine: Any = Engine(*[None] * 100)
    if end == "old":
        monkeypatch.setattr(module, "KEEP_S", 0.0)
    async with asyncio.TaskGroup() as tasks:
        releaser = Releaser(tasks, 0.001)
        await releaser.spawn(engine, BODY, {})
        if end == "closed":
            releaser.close()
        elif end == "restarted":
            engine.state = SimpleNamespace(epoch=2)
    assert len(engine.told) < 20

"""When an engine counts as up and as down, and when it is asked again, in virtual time."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from stub_engine import StubEngine, backend_of
from virtual_time import in_virtual_time

from engine.protocol import EngineState, Internal
from router.base.config import RouterConfig
from router.base.errors import Conflict, EngineUnreachable, NobodyListens, OutOfFiles
from router.engines.backend import Backend
from router.engines.monitor import Monitor

CONFIG = RouterConfig(health_interval_s=0.5, health_timeout_s=2.0, engine_silence_s=60.0)


class Watched:
    """An engine, its monitor, and what the monitor has said."""

    def __init__(self) -> None:
        self.engine = StubEngine()
        self.backend = backend_of(self.engine)
        self.said: list[str] = []
        self.refusal: Exception | None = None
        self.monitor = Monitor(
            self.backend, CONFIG, admit=self._admit, seen=self._seen, lost=self._lost,
            awake=asyncio.get_running_loop().time,
        )  # fmt: skip
        self.silences: list[tuple[float, float]] = []
        self.backend.end_silent = lambda *args: self.silences.append(args)

    async def _admit(self, backend: Backend, state: EngineState) -> None:
        if self.refusal is not None:
            raise self.refusal

    def _seen(self, backend: Backend, state: EngineState) -> None:
        self.said.append("up")

    def _lost(self, backend: Backend, reason: str) -> None:
        self.said.append(reason)

    async def check(self) -> tuple[float, float]:
        """Return the pause until the next check, and how long this one took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        return await self.monitor.check(), loop.time() - began

    def fails(self, error: Exception | None, times: int = 10**9) -> None:
        """Make the next health checks fail; without `error` they get no answer."""

        async def fail() -> None:
            nonlocal times
            times -= 1
            if times >= 0:
                if error is None:
                    await asyncio.Event().wait()
                raise error

        self.engine.does["health"] = fail


@in_virtual_time
async def test_an_answer_makes_it_up():
    watched = Watched()
    watched.backend.probe.set()
    assert await watched.check() == (0.5, 0.0)
    assert watched.said == ["up"]
    assert not watched.backend.probe.is_set()
    assert watched.engine.asked == {"health": 1, "state": 1}


@in_virtual_time
async def test_a_failure_is_repeated_until_the_timeout():
    watched = Watched()
    watched.fails(EngineUnreachable("it hung up"))
    _, took = await watched.check()
    assert watched.said == ["it hung up"]
    assert took == pytest.approx(2.0, abs=0.01)
    assert 5 <= watched.engine.asked["health"] <= 12  # less and less often
    watched.fails(Internal("its loop stands still"), times=3)
    pause, took = await watched.check()
    assert (watched.said[1:], pause) == (["up"], 0.5)
    assert 0.28 <= took <= 0.35  # 0.05, 0.1 and 0.2, each up to a fifth shorter


@in_virtual_time
async def test_silence_is_a_failure():
    watched = Watched()
    watched.fails(None)
    _, took = await watched.check()
    assert watched.said == ["silent for 2 s"]
    assert took == pytest.approx(2.0, abs=0.06)


@in_virtual_time
async def test_a_repeated_check_has_only_the_time_that_is_left():
    watched = Watched()

    async def fail() -> None:
        await asyncio.sleep(1.5 if watched.engine.asked["health"] == 1 else 1e6)
        raise EngineUnreachable("it hung up")

    watched.engine.does["health"] = fail
    _, took = await watched.check()
    assert watched.said == ["it hung up"]
    assert took == pytest.approx(2.0, abs=0.06)


@in_virtual_time
async def test_an_engine_that_stays_down_is_asked_less_and_less_often():
    watched = Watched()
    watched.fails(EngineUnreachable("gone"))
    most = 0.5
    for _ in range(6):
        pause, _ = await watched.check()
        assert 0.8 * most <= pause <= most
        most = min(2 * most, 5.0)  # ten intervals
    watched.fails(None, times=0)
    assert (await watched.check())[0] == 0.5
    watched.fails(EngineUnreachable("gone"))
    assert (await watched.check())[0] <= 0.5  # an answer makes the first pause short again


@pytest.mark.parametrize("error", [NobodyListens("refused"), Conflict("another model")])
@in_virtual_time
async def test_a_refusal_counts_at_once_and_is_no_reason_to_ask_less(error):
    watched = Watched()
    for _ in range(3):
        if isinstance(error, Conflict):
            watched.refusal = error
        else:
            watched.fails(error)
        assert await watched.check() == (0.5, 0.0)
    assert watched.said == [error.message] * 3


@in_virtual_time
async def test_a_defect_of_the_router_makes_one_engine_down(caplog):
    watched = Watched()
    watched.refusal = KeyError("a defect")
    pause, took = await watched.check()
    assert took == 0.0 and 0.4 <= pause <= 0.5
    assert watched.said == ["the router failed to check it: KeyError: 'a defect'"]
    assert "engine a:1 failed" in caplog.text


@in_virtual_time
async def test_an_answer_that_may_be_older_than_a_loss_does_not_count():
    watched, lost = Watched(), 0

    async def state() -> None:
        nonlocal lost
        if lost < 3:
            lost += 1
            watched.backend.doubts += 1
            await asyncio.sleep(1.5)  # three of them take longer than the timeout

    watched.engine.does["state"] = state
    pause, took = await watched.check()
    assert (watched.said, pause, took) == (["up"], 0.5, 4.5)
    assert watched.engine.asked["health"] == 4


@in_virtual_time
async def test_only_time_between_prompt_checks_counts_as_silence():
    watched, silences = Watched(), []
    for passed in (0.0, 0.5, 0.9, 1.0, 30.0):
        await asyncio.sleep(passed)
        await watched.check()
        silences.append(pytest.approx((min(passed, 1.0), 60.0)))
    assert watched.silences == silences
    watched.fails(NobodyListens("refused"))
    await watched.check()
    assert len(watched.silences) == 5


@in_virtual_time
async def test_failed_checks_are_repeated_at_least_every_0_4_seconds():
    loop, watched, times = asyncio.get_running_loop(), Watched(), []

    async def fail() -> None:
        times.append(loop.time())
        raise EngineUnreachable("it hung up")

    watched.engine.does["health"] = fail
    await watched.check()
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    for pause, longest in zip(pauses, (0.05, 0.1, 0.2, 0.4, 0.4), strict=False):
        assert 0.8 * longest <= pause <= longest
    assert len(pauses) > 5 and max(pauses) <= 0.4


@in_virtual_time
async def test_a_check_that_this_process_cannot_make_says_nothing(caplog):
    watched = Watched()
    warned = []
    for fails in (True, True, True, False, True, True):
        watched.fails(OutOfFiles("no files", retry_after_s=0.1), times=int(fails))
        caplog.clear()
        assert await watched.check() == (0.5, 0.0)
        warned.append(len(caplog.records))
    assert warned == [1, 0, 0, 0, 1, 0]  # the first time, and again after an answer
    assert watched.said == ["up"] and len(watched.silences) == 1

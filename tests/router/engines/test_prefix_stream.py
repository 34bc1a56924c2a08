"""The stream of an engine's prefix changes as the router reads it: at a pace, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import orjson
import pytest

from engine.virtual.loop import VirtualLoop
from router.base.errors import EngineUnreachable
from router.engines.client import BATCH, FRAME, LINE, PACE, WAITING, EngineClient
from router.engines.http_client import Reply

EMPTY = b'{"added":[],"removed":[]}\n'
LONG = orjson.dumps({"added": [f"{n:016x}" for n in range(8192)], "removed": []}) + b"\n"


class Http:
    """One stream, whose bytes the test passes to `sink`."""

    url = "http://engine"
    open = False
    sink: Callable[[bytes], None]
    lost: Callable[[EngineUnreachable], None]

    async def listen(self, path: str, sink: Any, lost: Any) -> tuple[Reply, Callable[[], None]]:
        self.sink, self.lost, self.open = sink, lost, True
        return Reply(200, None, b""), self._close

    def _close(self) -> None:
        self.open = False


def virtually(
    test: Callable[..., Coroutine[Any, Any, None]],
) -> Callable[..., None]:
    """Run a test in virtual time, with the reading end of a stream in a task."""

    async def run(**given: Any) -> None:
        http, seen = Http(), [0]

        async def read() -> None:
            async with aclosing(EngineClient(http).prefixes()) as changes:  # type: ignore[arg-type]
                async for _ in changes:
                    seen[0] += 1

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(1e6):  # virtual: a test that fails must not hang
                await test(http, seen, reading, **given)
        finally:
            reading.cancel()
            await asyncio.wait([reading])
        assert not http.open

    def runs(line: bytes) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(run(line=line))

    runs.__name__ = test.__name__
    return pytest.mark.parametrize("line", [EMPTY, LONG], ids=["empty", "long"])(runs)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  time is virtual
        await asyncio.sleep(0.001)


@virtually
async def test_changes_without_end_are_read_at_a_pace(http, seen, reading, line):
    loop, cost = asyncio.get_running_loop(), len(line) - 1 + LINE
    count = 4 * BATCH // cost + 4
    http.sink(line * count)
    began = loop.time()
    most, before = 0, 0
    while seen[0] < count:
        await asyncio.sleep(0.001)
        most, before = max(most, seen[0] - before), seen[0]
    assert most <= BATCH // cost + 1  # in a row
    assert loop.time() - began >= 0.7 * count * cost / PACE


@virtually
async def test_a_stream_that_outruns_the_pace_is_given_up_at_once(http, seen, reading, line):
    cost = len(line) - 1 + LINE
    for _ in range(WAITING // cost // 64 + 2):
        http.sink(line * 64)
    before = seen[0]
    await asyncio.wait([reading])
    assert isinstance(reading.exception(), EngineUnreachable)
    assert seen[0] == before  # what waits is not read first


@virtually
async def test_nothing_of_a_lost_stream_is_read(http, seen, reading, line):
    http.sink(line * 10)
    http.lost(EngineUnreachable("it closed the connection"))
    await asyncio.wait([reading])
    assert seen == [0]
    assert isinstance(reading.exception(), EngineUnreachable)


@virtually
async def test_a_frame_has_a_bound(http, seen, reading, line):
    http.sink(line)
    await until(lambda: seen == [1])
    for _ in range(FRAME // 1000 + 1):
        http.sink(b" " * 1000)
    await asyncio.wait([reading])
    assert "a line of more than" in str(reading.exception())

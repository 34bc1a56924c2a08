"""Pins over virtual engines: their real bookkeeping, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from virtual_deployment import VirtualDeployment, virtual_deployment

from engine.latency import FittedLatency, Profile, PutLatency
from engine.protocol import Release, StartGenerate
from engine.virtual import EngineKind, VirtualEngine
from router.engines import Backend
from router.pins import Pin, Pins
from router.telemetry import Events

PAGE = 16
PAGES = 64  # of an engine
PROFILE = Profile(
    name="test", model="test", device="none", gpus=0, source="made up", layers=4,
    kv_bytes_per_token=400, context_length=4096, pool_tokens=PAGES * PAGE,
    step=FittedLatency(
        prefill=(10.0, 0.1, 1e-5), decode=(8.0, 0.001, 0.5), large_decode=(8.0, 0.001, 0.5)
    ),
    put=PutLatency(bandwidth=1e6, layer_s=1e-3),
)  # fmt: skip
_salts = itertools.count(1)


def prefix(pages: int) -> list[int]:
    """Return a prefix that is in no cache, with some tokens beyond its last full page."""
    salt = next(_salts)
    return [(salt * 41 + 11 * i * i + 5 * i) % 900 + 1 for i in range(pages * PAGE + 5)]


@dataclass
class PinnedFleet:
    """Virtual engines, and the pins over them."""

    deployment: VirtualDeployment
    pins: Pins
    running: asyncio.Task[None]
    lines: list[bytes] = field(default_factory=list)  # of the events

    def engine(self, name: str) -> VirtualEngine:
        return self.deployment.fleet.engines[f"http://{name}.virtual"].engine

    def backend(self, name: str) -> Backend:
        return self.deployment.execution.runtime.registry[name]

    def kill(self, name: str) -> None:
        self.engine(name).die()

    def restart(self, name: str) -> None:
        self.deployment.fleet.restart(f"http://{name}.virtual")

    def pinned(self, name: str) -> int:
        """Return how many pages the engine has pinned."""
        return self.engine(name).cache.bookkeeping.page_use.pinned

    async def cache(self, name: str, tokens: list[int]) -> int:
        """Compute a prompt on an engine; return how many tokens were cached."""
        call = StartGenerate(request_id=f"x{next(_salts)}", prompt=tokens, max_tokens=1)
        stream = await self.engine(name).start_generate(call)
        event = await stream.next()
        assert event.begin is not None
        self.engine(name).release(Release(request_id=call.request_id))
        return event.begin

    async def flood(self, name: str) -> None:
        """Compute other prompts, which evict all that can be evicted."""
        for _ in range(4):
            await self.cache(name, prefix(PAGES // 2 - 2))

    async def until(self, condition: Callable[[], object], limit_s: float = 300.0) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110  the clock is virtual
                await asyncio.sleep(0.01)

    async def state(self, pin: Pin, state: str, *present: str) -> None:
        """Wait until the pin has this state, and copies on these engines."""
        try:
            await self.until(lambda: pin.state == state and sorted(pin.present()) == [*present])
        except TimeoutError:
            raise AssertionError(pin.describe()) from None

    def made(self) -> dict[str, int]:
        """Return how many copies were made, by how."""
        metric = self.deployment.execution.runtime.metrics.pin_copies_made
        (family,) = metric.collect()
        return {sample.labels["how"]: int(sample.value) for sample in family.samples}


@asynccontextmanager
async def pinned_fleet(
    *names: str,
    kinds: Mapping[str, EngineKind] | None = None,
    page_sizes: Mapping[str, int] | None = None,
    **options: Any,
) -> AsyncIterator[PinnedFleet]:
    """Engines with these names, or with `name:role`; at the end nothing is left on them."""
    engines = {}
    for each in names:
        name, _, role = each.partition(":")
        engines[name] = (role or "any", PROFILE)
    async with virtual_deployment(
        engines,
        "data_parallel",
        health_interval_s=0.5,
        options=options,
        kinds=kinds,
        page_sizes=page_sizes,
    ) as deployment:
        events = Events()
        pins = Pins(deployment.execution.runtime, events)
        running = asyncio.create_task(pins.run())
        fleet = PinnedFleet(deployment, pins, running)
        try:
            with events.listening(lambda: None) as listener:

                async def listen() -> None:
                    async for frames in listener.frames(1e6):
                        fleet.lines += frames.split(b"\n\n")

                listening = asyncio.create_task(listen())
                yield fleet
                listening.cancel()
            running.cancel()
            await asyncio.wait([running])
            assert [
                name for name in engines if fleet.engine(name).alive and fleet.pinned(name)
            ] == []
            await deployment.check_at_rest()
        finally:
            running.cancel()

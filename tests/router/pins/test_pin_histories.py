"""Random changes of pins and engines at random times: the engines end up with what is wanted."""

from __future__ import annotations

import asyncio
import random

import pytest
from pinned_fleet import PAGE, PAGES, PinnedFleet, pinned_fleet, prefix
from virtual_time import in_virtual_time

from engine.protocol import BadRequest, MicroserveError, Pin, page_names
from router.base import NotFound

NAMES = ("a", "b", "c", "d:decode")
IDS = [name.partition(":")[0] for name in NAMES]


class History:
    """Random events, one after the other."""

    def __init__(self, fleet: PinnedFleet, seed: int) -> None:
        self.fleet = fleet
        self.random = random.Random(seed)
        trunk, other = prefix(14), prefix(9)
        # Some overlap; some need most of what may be pinned.
        self.prefixes = [
            trunk[: 4 * PAGE], trunk[: 8 * PAGE], trunk[: 14 * PAGE],
            [*trunk[: 8 * PAGE], *prefix(3)], other, prefix(1), prefix(20), prefix(PAGES // 2),
        ]  # fmt: skip

    async def event(self) -> None:
        choices = [self.pin] * 6 + [self.unpin] * 4 + [self.kill, self.drain, self.flood, self.lose]
        await self.random.choice(choices)()

    async def pin(self) -> None:
        fields = self.random.choice(
            [{}, {"copies": self.random.randint(1, 5)}, {"engine": self.random.choice(IDS)}]
        )
        try:
            self.fleet.pins.pin(self.random.choice(self.prefixes), **fields)
        except BadRequest as error:
            assert error.param == "copies"

    async def unpin(self) -> None:
        fields = self.random.choice(
            [{}, {"copies": self.random.randint(1, 3)}, {"engine": self.random.choice(IDS)}]
        )
        try:
            pin = self.fleet.pins.find(self.random.choice(self.prefixes))
            self.fleet.pins.unpin(pin, **fields)
        except (NotFound, BadRequest):
            return

    async def kill(self) -> None:
        name = self.random.choice(IDS)
        if self.fleet.engine(name).alive:
            self.fleet.kill(name)
        else:
            self.fleet.restart(name)

    async def drain(self) -> None:
        backend = self.fleet.backend(self.random.choice(IDS))
        backend.draining = not backend.draining

    async def flood(self) -> None:
        name = self.random.choice(IDS)
        if not self.fleet.engine(name).alive:
            return
        try:
            await self.fleet.cache(name, prefix(self.random.randint(1, PAGES // 2)))
        except MicroserveError:
            return

    async def lose(self) -> None:
        """Another client of the engine ends a pin."""
        engine = self.fleet.engine(self.random.choice(IDS))
        if engine.alive:
            engine.unpin(Pin(prompt=self.random.choice(self.prefixes)))

    async def heal(self) -> None:
        """Make all engines take copies again, and wait until nothing can be improved."""
        for name in IDS:
            if not self.fleet.engine(name).alive:
                self.fleet.restart(name)
            self.fleet.backend(name).draining = False
        await asyncio.sleep(5)
        self.fleet.pins.check()
        await asyncio.sleep(120)
        await self.fleet.until(lambda: all(pin.task is None for pin in self.fleet.pins))

    def check(self) -> None:
        """Check that each engine has pinned exactly what the pins say."""
        pins = list(self.fleet.pins)
        for name in IDS:
            backend, pages = self.fleet.backend(name), set()
            for pin in pins:
                if backend in pin.placed and pin.complete(backend):
                    pages |= set(page_names(pin.tokens.tolist(), PAGE))
            assert self.fleet.pinned(name) == len(pages), name
        for pin in pins:
            assert pin.wanted
            if pin.state == "pinned":
                assert len(pin.present()) == pin.wanted
                assert set(pin.engines) <= set(pin.present())
            elif pin.state == "waiting for an engine":
                assert pin.wanted > len(IDS)
            else:
                assert pin.state == "waiting for room" and len(pin.present()) < pin.wanted


@pytest.mark.parametrize(
    "seed",
    [seed if seed < 10 else pytest.param(seed, marks=pytest.mark.thorough) for seed in range(25)],
)
def test_engines_end_up_with_what_is_wanted(seed: int) -> None:
    states = set()

    @in_virtual_time
    async def run() -> None:
        async with pinned_fleet(*NAMES) as fleet:
            history = History(fleet, seed)
            for _ in range(3):
                for _ in range(40):
                    await history.event()
                    await asyncio.sleep(history.random.choice([0, 0.001, 0.02, 0.3, 3]))
                    states.update(pin.state for pin in fleet.pins)
                await history.heal()
                history.check()
            for pin in list(fleet.pins):
                fleet.pins.unpin(pin)
            await fleet.until(lambda: not list(fleet.pins))
            assert [fleet.pinned(name) for name in IDS] == [0] * len(IDS)

    run()
    assert {"pinned", "copying"} <= states

"""Pinned prefixes in fleets whose engines differ in their KV, or cannot pin."""

from __future__ import annotations

import pytest
from pinned_fleet import PAGE, pinned_fleet, prefix
from virtual_time import in_virtual_time

from engine.protocol import ALL_CAPABILITIES, Unsupported
from engine.virtual import EngineKind
from router.base import Conflict, NotFound
from router.simulation.fleet import VirtualCalls

OTHER = EngineKind(kv="other")


def without(*lacking: str, kv: str = "") -> EngineKind:
    return EngineKind(tuple(each for each in ALL_CAPABILITIES if each not in lacking), kv)


@in_virtual_time
async def test_copies_are_made_within_the_group_of_the_first_engine_that_can():
    kinds = {"a": without("pin"), "b": OTHER, "c": OTHER}
    async with pinned_fleet("a", "b", "c", kinds=kinds) as fleet:
        pin = fleet.pins.pin(prefix(10), copies=3)
        await fleet.until(lambda: len(pin.present()) == 2)
        assert pin.present() == ["b", "c"]
        assert fleet.made() == {"computed": 1, "copied": 1}
        await fleet.until(lambda: pin.state == "waiting for an engine")


@in_virtual_time
async def test_an_engine_of_another_group_has_pins_of_its_own():
    async with pinned_fleet("a", "b", kinds={"b": OTHER}, page_sizes={"b": 32}) as fleet:
        tokens = prefix(10)
        first = fleet.pins.pin(tokens)
        await fleet.state(first, "pinned", "a")
        second = fleet.pins.pin(tokens, engine="b")
        await fleet.state(second, "pinned", "b")
        assert first is not second and len(second.tokens) == 10 * PAGE
        assert (fleet.pinned("a"), fleet.pinned("b")) == (10, 5)
        assert fleet.made() == {"computed": 2}
        for wanted in (first, second):
            found = fleet.pins.find(tokens)
            fleet.pins.unpin(found)
            await fleet.until(lambda found=found: found not in list(fleet.pins))
            assert wanted in (first, second)
        with pytest.raises(NotFound):
            fleet.pins.find(tokens)


@in_virtual_time
async def test_a_prefix_with_equal_pages_is_pinned_in_one_group():
    async with pinned_fleet("a", "b", kinds={"b": OTHER}) as fleet:
        tokens = prefix(10)
        pin = fleet.pins.pin(tokens, engine="b")
        await fleet.state(pin, "pinned", "b")
        with pytest.raises(Conflict, match="exchange no KV with a; unpin it first"):
            fleet.pins.pin(tokens, engine="a")
        assert fleet.pins.pin(tokens, copies=2) is pin  # it stays in its group
        await fleet.state(pin, "waiting for an engine", "b")
        fleet.pins.unpin(pin)
        await fleet.until(lambda: not list(fleet.pins))
        await fleet.state(fleet.pins.pin(tokens, engine="a"), "pinned", "a")


@in_virtual_time
async def test_what_cannot_pin_is_not_asked_to():
    async with pinned_fleet("a", "b", kinds={"b": without("pin")}) as fleet:
        with pytest.raises(Unsupported, match="engine b does not support pin"):
            fleet.pins.pin(prefix(10), engine="b")
        assert not list(fleet.pins)
    async with pinned_fleet("a", "b", kinds=dict.fromkeys("ab", without("pin"))) as fleet:
        with pytest.raises(Unsupported, match="no engine of this router supports pin"):
            fleet.pins.pin(prefix(10))


@in_virtual_time
async def test_a_restarted_engine_that_cannot_pin_is_forgotten():
    async with pinned_fleet("a", "b") as fleet:
        tokens = prefix(10)
        pin = fleet.pins.pin(tokens, engine="a")
        await fleet.state(pin, "pinned", "a")
        fleet.kill("a")
        fleet.engine("a").kind = without("pin")
        fleet.restart("a")
        await fleet.until(lambda: not fleet.backend("a").can("pin"))
        await fleet.state(pin, "waiting for an engine")
        fleet.pins.unpin(pin)
        await fleet.until(lambda: not list(fleet.pins))


@in_virtual_time
async def test_the_end_of_the_router_asks_only_engines_that_can_unpin(monkeypatch):
    unpinned: list[str] = []

    async def unpin(self, body, headers):
        unpinned.append(self.url)
        return 0

    async with pinned_fleet("a", "b") as fleet:
        pin = fleet.pins.pin(prefix(3), copies=2)
        await fleet.state(pin, "pinned", "a", "b")
        model = fleet.backend("a").model
        assert model is not None
        fleet.backend("a").model = model.model_copy(update={"capabilities": ["prep_recv"]})
        for name in "ab":
            fleet.kill(name)
        monkeypatch.setattr(VirtualCalls, "unpin", unpin)
    assert unpinned == ["http://b.virtual"]


@pytest.mark.parametrize(
    "kinds",
    [
        {"a": without("remote_send")}, {"b": without("prep_recv")}, {"b": without("commit")},
        {"a": without("prefixes")},
    ],
)  # fmt: skip
@in_virtual_time
async def test_what_cannot_be_copied_is_computed(kinds, monkeypatch):
    prepared: list[object] = []
    prepare = VirtualCalls.prep_recv

    async def prep_recv(self, body, headers):
        prepared.append(body)
        return await prepare(self, body, headers)

    monkeypatch.setattr(VirtualCalls, "prep_recv", prep_recv)
    async with pinned_fleet("a", "b", kinds=kinds) as fleet:
        tokens = prefix(10)
        await fleet.cache("a", tokens)
        pin = fleet.pins.pin(tokens, engine="b")
        await fleet.state(pin, "pinned", "b")
        assert fleet.made() == {"computed": 1} and prepared == []

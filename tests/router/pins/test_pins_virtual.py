"""What becomes of pinned prefixes on virtual engines: copies, losses, evictions, unpins."""

from __future__ import annotations

import asyncio

import pytest
from pinned_fleet import PAGE, PAGES, pinned_fleet, prefix
from virtual_time import in_virtual_time

from engine.protocol import BadRequest, NoCapacity, Pin, StartGenerate
from router.base import EngineUnreachable, NotFound, RouterConfig
from router.pins import pins, reconciler
from router.simulation.fleet import VirtualCalls


@in_virtual_time
async def test_a_prefix_that_nobody_has_is_computed_once_and_copied():
    async with pinned_fleet("a", "b", "c") as fleet:
        tokens = prefix(10)
        pin = fleet.pins.pin(tokens, copies=2)
        await fleet.until(lambda: pin.state == "pinned")
        assert len(pin.present()) == 2 and pin.wanted == 2
        assert fleet.made() == {"computed": 1, "copied": 1}
        assert sorted(fleet.pinned(name) for name in "abc") == [0, 10, 10]
        for name in pin.present():
            await fleet.flood(name)
            assert await fleet.cache(name, tokens) == 10 * PAGE
        assert fleet.pins.pin(tokens) is pin and pin.wanted == 2  # no number: nothing changes
        fleet.pins.unpin(pin)
        assert pin.describe()["copies"] == 0
        await fleet.until(lambda: not list(fleet.pins))
        for name in "abc":
            await fleet.flood(name)
            assert fleet.pinned(name) == 0 and await fleet.cache(name, tokens) == 0


@in_virtual_time
async def test_an_engine_that_has_the_prefix_is_preferred():
    async with pinned_fleet("a", "b", "c") as fleet:
        tokens = prefix(10)
        await fleet.cache("b", tokens)
        pin = fleet.pins.pin(tokens)
        await fleet.state(pin, "pinned", "b")
        assert fleet.made() == {"cached": 1}


@in_virtual_time
async def test_what_another_engine_has_is_put_and_the_rest_is_computed():
    async with pinned_fleet("a", "b") as fleet:
        tokens = prefix(10)
        await fleet.cache("b", tokens[: 6 * PAGE + 1])
        pin = fleet.pins.pin(tokens, engine="a")
        await fleet.state(pin, "pinned", "a")
        metrics = fleet.deployment.execution.runtime.metrics
        assert metrics.put_bytes._value.get() == 6 * PAGE * 400
        assert fleet.made() == {"computed": 1}
        assert fleet.pinned("a") == 10 and fleet.pinned("b") == 0


@in_virtual_time
async def test_prefill_engines_take_copies_before_decode_engines():
    async with pinned_fleet("d:decode", "p:prefill", "q:prefill") as fleet:
        tokens = prefix(10)
        await fleet.cache("d", tokens)
        pin = fleet.pins.pin(tokens, copies=2)
        await fleet.state(pin, "pinned", "p", "q")
        assert fleet.made() == {"copied": 2}
        fleet.pins.pin(tokens, copies=3)
        await fleet.state(pin, "pinned", "d", "p", "q")
        fleet.pins.pin(tokens, copies=2)
        await fleet.state(pin, "pinned", "p", "q")
        assert fleet.pinned("d") == 0


@in_virtual_time
async def test_copies_of_a_dead_engine_come_back_elsewhere():
    async with pinned_fleet("a", "b", "c") as fleet:
        pin = fleet.pins.pin(prefix(10), copies=2)
        await fleet.until(lambda: pin.state == "pinned")
        lost, kept = pin.present()
        (spare,) = {"a", "b", "c"} - {lost, kept}
        fleet.kill(lost)
        await fleet.state(pin, "pinned", *sorted((kept, spare)))
        fleet.kill(spare)
        await fleet.state(pin, "waiting for an engine", kept)
        fleet.restart(lost)
        await fleet.state(pin, "pinned", *sorted((kept, lost)))
        assert fleet.backend(lost).state.epoch == 2 and fleet.pinned(lost) == 10


@in_virtual_time
async def test_a_prefix_pinned_to_an_engine_comes_back_with_it():
    async with pinned_fleet("a", "b") as fleet:
        tokens = prefix(10)
        pin = fleet.pins.pin(tokens, engine="a")
        await fleet.state(pin, "pinned", "a")
        fleet.kill("a")
        await fleet.state(pin, "waiting for an engine")
        assert fleet.pinned("b") == 0
        fleet.restart("a")
        await fleet.state(pin, "pinned", "a")
        assert fleet.made() == {"computed": 2}
        states = [line.split(b'"state":"')[1].split(b'"')[0] for line in fleet.lines if line]
        assert states == [
            b"copying", b"pinned", b"waiting for an engine", b"copying", b"pinned"
        ]  # fmt: skip


@in_virtual_time
async def test_a_drained_engine_gives_its_copy_away_and_keeps_one_that_names_it():
    async with pinned_fleet("a", "b") as fleet:
        registry = fleet.deployment.execution.runtime.registry
        tokens, named = prefix(10), prefix(4)
        await fleet.cache("a", tokens)
        pin = fleet.pins.pin(tokens)
        other = fleet.pins.pin(named, engine="a")
        await fleet.state(pin, "pinned", "a")
        await fleet.state(other, "pinned", "a")
        registry.drain(fleet.backend("a"), True)
        await fleet.state(pin, "pinned", "b")
        assert fleet.made() == {"cached": 1, "computed": 1, "copied": 1}
        await fleet.until(lambda: fleet.pinned("a") == 4)
        assert other.state == "pinned" and other.present() == ["a"]


@in_virtual_time
async def test_a_removed_engine_is_unpinned_and_its_copies_come_back_elsewhere():
    async with pinned_fleet("a", "b") as fleet:
        tokens = prefix(10)
        await fleet.cache("a", tokens)
        pin = fleet.pins.pin(tokens)
        await fleet.state(pin, "pinned", "a")
        registry = fleet.deployment.execution.runtime.registry
        registry.remove(fleet.backend("a"), for_good=True)
        await fleet.state(pin, "pinned", "b")
        assert fleet.pinned("a") == 0 and list(pin.placed) == [fleet.backend("b")]


@in_virtual_time
async def test_overlapping_prefixes_are_unpinned_one_by_one():
    async with pinned_fleet("a") as fleet:
        long = prefix(12)
        nested = [fleet.pins.pin(long[: pages * PAGE]) for pages in (4, 12, 8)]
        for pin in nested:
            await fleet.state(pin, "pinned", "a")
        assert fleet.pinned("a") == 12
        fleet.pins.unpin(nested[1])
        await fleet.until(lambda: len(list(fleet.pins)) == 2)
        await fleet.flood("a")
        assert fleet.pinned("a") == 8 and await fleet.cache("a", long) == 8 * PAGE
        fleet.pins.unpin(nested[0])
        await fleet.until(lambda: len(list(fleet.pins)) == 1)
        assert fleet.pinned("a") == 8


@in_virtual_time
async def test_a_prefix_without_room_waits_until_another_is_unpinned():
    async with pinned_fleet("a") as fleet:
        first = fleet.pins.pin(prefix(20))
        await fleet.state(first, "pinned", "a")
        second = fleet.pins.pin(prefix(20))
        await fleet.state(second, "waiting for room")
        assert "20 are wanted" in second.error and fleet.pinned("a") == 20
        assert fleet.made() == {"computed": 1}  # nothing is computed in vain
        fleet.pins.unpin(first)
        await fleet.state(second, "pinned", "a")
        assert second.error == "" and fleet.pinned("a") == 20


@in_virtual_time
async def test_overlapping_pages_need_room_once():
    async with pinned_fleet("a") as fleet:
        long = prefix(PAGES // 2)
        for pages in (PAGES // 2 - 2, PAGES // 2):
            pin = fleet.pins.pin(long[: pages * PAGE])
            await fleet.state(pin, "pinned", "a")
        assert fleet.pinned("a") == PAGES // 2


@in_virtual_time
async def test_an_engine_without_room_is_passed_over():
    async with pinned_fleet("a", "b") as fleet:
        tokens = prefix(20)
        first = fleet.pins.pin(prefix(20), engine="a")
        await fleet.state(first, "pinned", "a")
        await fleet.cache("a", tokens)  # so it would come first
        second = fleet.pins.pin(tokens)
        await fleet.state(second, "pinned", "b")
        assert fleet.made() == {"computed": 1, "copied": 1}


@in_virtual_time
async def test_an_unpin_during_a_copy_leaves_nothing():
    async with pinned_fleet("a") as fleet:
        engine, tokens = fleet.engine("a"), prefix(20)
        pin = fleet.pins.pin(tokens)
        await fleet.until(lambda: engine.busy)
        fleet.pins.unpin(pin)
        with pytest.raises(NotFound):
            fleet.pins.find(tokens)
        await fleet.until(lambda: not engine.busy and not list(fleet.pins))
        assert fleet.pinned("a") == 0 and fleet.made() == {}


@in_virtual_time
async def test_pinning_again_during_an_unpin_keeps_the_prefix():
    async with pinned_fleet("a") as fleet:
        tokens = prefix(10)
        pin = fleet.pins.pin(tokens)
        await fleet.state(pin, "pinned", "a")
        fleet.pins.unpin(pin)
        assert fleet.pins.pin(tokens) is pin
        await fleet.state(pin, "pinned", "a")
        await asyncio.sleep(10)
        assert list(fleet.pins) == [pin] and fleet.pinned("a") == 10


@in_virtual_time
async def test_a_pin_that_somebody_else_ended_comes_back():
    async with pinned_fleet("a") as fleet:
        tokens = prefix(10)
        pin = fleet.pins.pin(tokens)
        await fleet.state(pin, "pinned", "a")
        fleet.engine("a").unpin(Pin(prompt=tokens))
        await fleet.flood("a")
        fleet.pins.check()
        await fleet.until(lambda: fleet.pinned("a") == 10)
        await fleet.state(pin, "pinned", "a")
        fleet.engine("a").unpin(Pin(prompt=tokens))
        await asyncio.sleep(61)  # of itself too, once a minute
        assert fleet.pinned("a") == 10
        assert fleet.made() == {"computed": 2}


@in_virtual_time
async def test_engines_add_up_and_are_unpinned_by_name():
    async with pinned_fleet("a", "b", "c") as fleet:
        tokens = prefix(10)
        pin = fleet.pins.pin(tokens, engine="a")
        fleet.pins.pin(tokens, engine="b")
        await fleet.state(pin, "pinned", "a", "b")
        with pytest.raises(BadRequest, match="2 engines are named"):
            fleet.pins.pin(tokens, copies=1)
        with pytest.raises(BadRequest, match="2 engines are named"):
            fleet.pins.unpin(pin, copies=1)
        with pytest.raises(NotFound, match="not pinned to engine 'c'"):
            fleet.pins.unpin(pin, engine="c")
        fleet.pins.pin(tokens, copies=3)
        await fleet.state(pin, "pinned", "a", "b", "c")
        fleet.pins.unpin(pin, copies=1)
        await fleet.state(pin, "pinned", "a", "b")
        fleet.pins.pin(tokens, copies=2)
        fleet.pins.unpin(pin, engine="a")
        await asyncio.sleep(10)  # two copies, one of them on b
        assert pin.wanted == 2 and len(pin.present()) == 2 and "b" in pin.present()
        fleet.pins.unpin(pin, copies=2)
        await fleet.until(lambda: not list(fleet.pins))


@in_virtual_time
async def test_what_can_never_be_pinned_is_refused():
    async with pinned_fleet("a", max_model_len=20 * PAGE) as fleet:
        for tokens, fields, error, param in (
            (prefix(0), {}, BadRequest, "prefix"),
            (prefix(20), {}, BadRequest, "prefix"),  # the context
            (prefix(33), {}, BadRequest, "prefix"),  # the pool
            (prefix(2), {"engine": "b"}, NotFound, "engine"),
        ):
            with pytest.raises(error) as refused:
                fleet.pins.pin(tokens, **fields)
            assert refused.value.param == param
        assert list(fleet.pins) == []


@in_virtual_time
async def test_the_number_of_pins_is_bounded():
    async with pinned_fleet("a") as fleet:
        most = fleet.deployment.config.max_pins
        for _ in range(most):
            fleet.pins.pin(prefix(1))
        with pytest.raises(NoCapacity, match=f"{most} prefixes"):
            fleet.pins.pin(prefix(1))
        table = list(fleet.pins)
        await fleet.until(lambda: sum(pin.state == "pinned" for pin in table) == PAGES // 2)
        await fleet.until(lambda: all(pin.state != "copying" for pin in table))
        assert fleet.pinned("a") == PAGES // 2


@in_virtual_time
async def test_the_loss_of_a_copy_is_noticed_during_other_work_on_the_pin(monkeypatch):
    async with pinned_fleet("a", "b", "c") as fleet:
        tokens = prefix(10)
        pin = fleet.pins.pin(tokens, copies=2)
        await fleet.until(lambda: pin.state == "pinned")
        unpin, unpinned = VirtualCalls.unpin, []

        async def slow(self, body, headers):
            unpinned.append(self.engine.config.engine_id)
            await asyncio.sleep(1.5)
            return await unpin(self, body, headers)

        before = pin.present()
        monkeypatch.setattr(VirtualCalls, "unpin", slow)
        fleet.pins.pin(tokens, copies=1)
        await fleet.until(lambda: unpinned)
        (kept,) = set(before) - set(unpinned)
        fleet.kill(kept)
        await fleet.until(lambda: fleet.made().get("cached"), 5)  # pinned where it was unpinned
        await fleet.state(pin, "pinned", unpinned[0])


@in_virtual_time
async def test_a_prefix_of_another_model_waits_until_it_is_pinned_for_this_one():
    async with pinned_fleet("a") as fleet:
        tokens = prefix(10)
        pin = fleet.pins.pin(tokens)
        pin.fingerprint = "of another model"
        await fleet.state(pin, "waiting for an engine")
        assert fleet.pinned("a") == 0
        assert fleet.pins.pin(tokens) is pin
        await fleet.state(pin, "pinned", "a")


@in_virtual_time
async def test_the_tokens_of_all_pins_are_bounded(monkeypatch):
    monkeypatch.setattr(pins, "MOST_TOKENS", 30 * PAGE)
    async with pinned_fleet("a") as fleet:
        fleet.pins.pin(prefix(20))
        with pytest.raises(NoCapacity, match="more than 480 tokens"):
            fleet.pins.pin(prefix(11))
        fleet.pins.pin(prefix(10))


@in_virtual_time
async def test_the_calls_at_a_time_are_bounded(monkeypatch):
    async with pinned_fleet("a") as fleet:
        table = [fleet.pins.pin(prefix(1)) for _ in range(PAGES // 2)]
        await fleet.until(lambda: all(pin.state == "pinned" for pin in table))
        unpin, now, most = VirtualCalls.unpin, 0, 0

        async def counted(self, body, headers):
            nonlocal now, most
            now += 1
            most = max(most, now)
            try:
                return await unpin(self, body, headers)
            finally:
                now -= 1

        monkeypatch.setattr(VirtualCalls, "unpin", counted)
        for pin in table:
            fleet.pins.unpin(pin)
        await fleet.until(lambda: not list(fleet.pins))
        assert most == reconciler.CALLS < len(table)


@in_virtual_time
async def test_an_engine_that_does_not_answer_holds_up_no_other(monkeypatch):
    async with pinned_fleet("a", "b") as fleet:
        table = {
            name: [fleet.pins.pin(prefix(1), engine=name) for _ in range(2 * reconciler.CALLS)]
            for name in "ab"
        }
        await fleet.until(lambda: all(p.state == "pinned" for p in [*table["a"], *table["b"]]))
        unpin, silent = VirtualCalls.unpin, fleet.backend("a").url

        async def hanging(self, body, headers):
            if self.url == silent:
                await asyncio.sleep(1e5)
            return await unpin(self, body, headers)

        monkeypatch.setattr(VirtualCalls, "unpin", hanging)
        for pin in [*table["a"], *table["b"]]:
            fleet.pins.unpin(pin)
        await asyncio.sleep(RouterConfig().release_timeout_s / 2)
        assert not fleet.pinned("b")
        assert fleet.pinned("a") == 2 * reconciler.CALLS
        monkeypatch.setattr(VirtualCalls, "unpin", unpin)
        await fleet.until(lambda: not list(fleet.pins))


@in_virtual_time
async def test_a_silent_engine_is_unpinned_when_it_answers():
    async with pinned_fleet("a", "b") as fleet:
        tokens = prefix(10)
        pin = fleet.pins.pin(tokens, engine="a")
        await fleet.state(pin, "pinned", "a")
        fleet.backend("a").go_down("silent")
        fleet.pins.unpin(pin)
        assert pin.placed and fleet.pinned("a") == 10
        await fleet.until(lambda: not list(fleet.pins))
        assert fleet.pinned("a") == 0


@in_virtual_time
async def test_prefixes_that_are_pinned_together_do_not_compute_in_vain():
    async with pinned_fleet("a") as fleet:
        prefixes = [prefix(20), prefix(20)]
        first, second = [fleet.pins.pin(tokens) for tokens in prefixes]
        await fleet.state(first, "pinned", "a")
        await fleet.state(second, "waiting for room")
        assert await fleet.cache("a", prefixes[1]) == 0


@in_virtual_time
async def test_a_copy_is_ended_where_the_engine_is_drained_in_the_middle_of_it():
    async with pinned_fleet("a", "b", max_batch=1) as fleet:
        full = fleet.pins.pin(prefix(30), engine="b")
        await fleet.state(full, "pinned", "b")
        tokens = prefix(20)
        await fleet.cache("a", tokens[: 6 * PAGE + 1])
        call = StartGenerate(request_id="long", prompt=prefix(2), max_tokens=400)
        stream = await fleet.engine("a").start_generate(call)
        pin = fleet.pins.pin(tokens)
        await fleet.until(lambda: fleet.pinned("a") == 6)  # the rest waits for the generation
        fleet.deployment.execution.runtime.registry.drain(fleet.backend("a"), True)
        await fleet.state(pin, "waiting for room")
        assert "engine b has 30 of" in pin.error
        assert fleet.pinned("a") == 0 and len(fleet.engine("a").busy) == 1
        stream.close()


@in_virtual_time
async def test_what_is_pinned_in_part_holds_no_room_while_the_rest_waits():
    async with pinned_fleet("a", max_batch=1, max_waiting=0) as fleet:
        tokens = prefix(20)
        await fleet.cache("a", tokens[: 6 * PAGE + 1])
        call = StartGenerate(request_id="long", prompt=prefix(2), max_tokens=400)
        stream = await fleet.engine("a").start_generate(call)
        pin = fleet.pins.pin(tokens)
        await fleet.state(pin, "waiting for room")
        assert "running or waiting" in pin.error and fleet.pinned("a") == 0
        while (await stream.next()).finish_reason is None:
            pass
        await fleet.state(pin, "pinned", "a")


@in_virtual_time
async def test_a_dead_engine_that_is_removed_is_forgotten():
    async with pinned_fleet("a", "b") as fleet:
        pin = fleet.pins.pin(prefix(10), engine="a")
        await fleet.state(pin, "pinned", "a")
        fleet.kill("a")
        await fleet.state(pin, "waiting for an engine")
        fleet.deployment.execution.runtime.registry.remove(fleet.backend("a"), for_good=True)
        await fleet.until(lambda: not pin.placed)
        fleet.pins.unpin(pin)
        await fleet.until(lambda: not list(fleet.pins))


@in_virtual_time
async def test_an_unpin_that_failed_is_repeated(monkeypatch):
    async with pinned_fleet("a") as fleet:
        pin = fleet.pins.pin(prefix(10))
        await fleet.state(pin, "pinned", "a")
        unpin, lost = VirtualCalls.unpin, [EngineUnreachable("the connection broke")]

        async def broken(self, body, headers):
            if lost:
                raise lost.pop()
            return await unpin(self, body, headers)

        monkeypatch.setattr(VirtualCalls, "unpin", broken)
        fleet.pins.unpin(pin)
        await fleet.until(lambda: pin.error)
        assert pin.state == "unpinning" and fleet.pinned("a") == 10
        await fleet.until(lambda: not list(fleet.pins))
        assert not lost and fleet.pinned("a") == 0


@in_virtual_time
async def test_an_engine_that_comes_back_late_gets_its_copy_at_once():
    async with pinned_fleet("a") as fleet:
        pin = fleet.pins.pin(prefix(10))
        await fleet.state(pin, "pinned", "a")
        fleet.kill("a")
        await asyncio.sleep(600)  # by now the pauses are long
        fleet.restart("a")
        await fleet.until(lambda: pin.state == "pinned", 3)


@in_virtual_time
async def test_a_pin_that_is_asked_for_again_does_not_begin_again():
    async with pinned_fleet("a") as fleet:
        tokens = prefix(20)
        pin = fleet.pins.pin(tokens)
        await fleet.until(lambda: fleet.engine("a").busy)
        task = pin.task
        assert fleet.pins.pin(tokens, copies=1) is pin
        await asyncio.sleep(0)
        assert pin.task is task and not task.cancelling()
        await fleet.state(pin, "pinned", "a")

"""Which model is served, and how often an engine's model is read, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from stub_engine import StubEngine, backend_of, model_info
from virtual_time import in_virtual_time

from engine.protocol import Timeout
from router.base.errors import Conflict
from router.engines.adoption import MODEL_S, REFETCH_S, Adoption

OTHER = model_info(name="another", fingerprint="g")


class Fleet:
    """Engines in order, and the adoption of their model."""

    def __init__(self, *infos: Any) -> None:
        self.engines = [StubEngine(f"e{n}", info=info) for n, info in enumerate(infos)]
        self.backends = [backend_of(engine) for engine in self.engines]
        self.adoption = Adoption(lambda: self.backends, 2.0)

    async def admit(self, number: int) -> str:
        """Ask for one engine; return why it may not serve, empty if it may."""
        engine, backend = self.engines[number], self.backends[number]
        state = await engine.state()
        try:
            await self.adoption.admit(backend, state)
        except Conflict as refused:
            backend.status = "down"
            return refused.message
        finally:
            backend.settled.set()
        backend.status, backend.state = "up", state
        return ""

    @property
    def served(self) -> str:
        assert self.adoption.served is not None
        return self.adoption.served.info.name


@in_virtual_time
async def test_the_model_of_a_process_is_read_once():
    fleet = Fleet(model_info())
    for epoch in (1, 1, 1, 2, 2):
        fleet.engines[0].tells["epoch"] = epoch
        assert await fleet.admit(0) == ""
    assert fleet.engines[0].asked["model"] == 2


@in_virtual_time
async def test_another_model_is_refused_without_reading_it_again():
    fleet = Fleet(model_info(), OTHER, model_info(fingerprint="h", eos_token_ids=[1]))
    assert await fleet.admit(0) == ""
    for _ in range(3):
        assert await fleet.admit(1) == "it serves another, not the fake served here"
        assert "its fake has another vocabulary or other EOS tokens" in await fleet.admit(2)
    assert [engine.asked["model"] for engine in fleet.engines] == [1, 1, 1]
    fleet.engines[1].tells["epoch"] = 2  # another process may have another model
    fleet.engines[1].info = model_info()
    assert await fleet.admit(1) == ""
    assert fleet.engines[1].asked["model"] == 2


@in_virtual_time
async def test_the_only_engine_may_restart_with_another_model():
    fleet = Fleet(model_info())
    assert await fleet.admit(0) == ""
    fleet.engines[0].info = OTHER
    fleet.engines[0].tells["epoch"] = 2
    assert fleet.backends[0].status == "up"  # it restarted between two checks
    assert await fleet.admit(0) == ""
    assert fleet.served == "another"


@pytest.mark.parametrize("change", [{"vocab_size": 999}, {"page_size": 32}])
@in_virtual_time
async def test_equal_weights_need_equal_vocabularies_and_pages(change):
    """Such an engine cannot serve, whatever the others do."""
    fleet = Fleet(model_info(), model_info(**change))
    assert await fleet.admit(0) == ""
    for _ in range(2):
        assert "another vocabulary or page size" in await fleet.admit(1)
        fleet.backends[0].status = "down"
    assert fleet.engines[1].asked["model"] == 1


@in_virtual_time
async def test_a_model_that_cannot_be_read_is_refused_for_good():
    fleet = Fleet(model_info(tokenizer_json="{}"))
    for _ in range(2):
        assert "the tokenizer of fake" in await fleet.admit(0)
    assert fleet.engines[0].asked["model"] == 1
    assert fleet.adoption.served is None


@in_virtual_time
async def test_another_model_is_served_once_no_engine_has_the_earlier_one():
    fleet = Fleet(model_info(), OTHER)
    first, other = fleet.backends
    assert await fleet.admit(0) == ""
    for status in ("suspect", "unknown", "up"):
        first.status = status
        assert await fleet.admit(1) != ""
    first.status = "down"
    assert await fleet.admit(1) == ""
    assert (fleet.served, other.refusal) == ("another", None)
    assert fleet.engines[1].asked["model"] == 2  # it was forgotten while it could not serve
    # The first one is the same process, and its model is known; it is not asked for it again.
    assert "it serves fake, not the another served here" in await fleet.admit(0)
    assert fleet.engines[0].asked["model"] == 1
    other.status = "down"
    assert await fleet.admit(0) == ""
    assert fleet.served == "fake"


@in_virtual_time
async def test_a_model_is_read_seldom_and_within_a_time_limit():
    loop = asyncio.get_running_loop()
    fleet = Fleet(model_info())
    for epoch in range(4):
        fleet.engines[0].tells["epoch"] = epoch
        began = loop.time()
        await fleet.admit(0)
        assert loop.time() - began == pytest.approx(REFETCH_S if epoch else 0.0, abs=0.01)
    fleet.engines[0].tells["epoch"] = 9
    fleet.engines[0].does["model"] = asyncio.Event().wait
    began = loop.time()
    with pytest.raises(Timeout, match="did not tell its model within 10 s"):
        await fleet.admit(0)
    assert loop.time() - began == pytest.approx(REFETCH_S + MODEL_S, abs=0.01)


async def order(fleet: Fleet, answers_s: float) -> float:
    """Admit the second engine while the first one answers later; return when it was admitted."""
    loop = asyncio.get_running_loop()
    loop.call_later(answers_s, fleet.backends[0].settled.set)
    began = loop.time()
    assert await fleet.admit(1) == ""
    return loop.time() - began


@in_virtual_time
async def test_a_first_model_waits_for_the_engines_before_it():
    for answers_s, waits_s in ((1.0, 1.0), (100.0, 2.0)):
        fleet = Fleet(model_info(), model_info(), model_info())  # it does not wait for the third
        assert await order(fleet, answers_s) == pytest.approx(waits_s, abs=0.01)
    began = asyncio.get_running_loop().time()
    assert await fleet.admit(2) == ""  # a model is served already
    assert asyncio.get_running_loop().time() == began


@in_virtual_time
async def test_two_engines_at_once_make_one_model():
    fleet = Fleet(OTHER, model_info())
    fleet.backends[0].settled.set()

    first, second = await asyncio.gather(fleet.admit(0), fleet.admit(1))
    assert (first, fleet.served) == ("", "another")
    assert "not the another served here" in second


def fresh(name: str) -> str:
    """Return an equal string that is another object, as one that was read from a reply."""
    return "".join(["x", name])[1:]


@in_virtual_time
async def test_an_older_epoch_is_another_process_too():
    """Epochs are compared, not ordered: a clock may have been set back."""
    fleet = Fleet(model_info())
    for epoch in (2000, 2000, 1000, 1000):
        fleet.engines[0].tells["epoch"] = int(str(epoch))
        assert await fleet.admit(0) == ""
    assert fleet.engines[0].asked["model"] == 2


@pytest.mark.parametrize("name", ["a model", "zebra"])
@in_virtual_time
async def test_a_refusal_names_the_models_or_their_difference(name):
    fleet = Fleet(
        model_info(name=fresh("fake")), model_info(name=name, fingerprint="gg"),
        model_info(name=fresh("fake"), fingerprint="hh", add_bos=True),
    )  # fmt: skip
    assert await fleet.admit(0) == ""
    fleet.backends[0].status = fresh("up")  # type: ignore[assignment]
    assert await fleet.admit(1) == f"it serves {name}, not the fake served here"
    assert await fleet.admit(2) == "its fake has another tokenizer than the one served here"


@in_virtual_time
async def test_contexts_are_those_of_the_engines_with_the_served_model():
    first = model_info(fingerprint=fresh("ff"), context_length=256)
    fleet = Fleet(
        first, model_info(fingerprint=fresh("ff"), context_length=64),
        model_info(name="other", fingerprint="gg", context_length=128), first,
    )  # fmt: skip
    fleet.adoption.note_contexts()  # none is served yet
    for number in (0, 1):
        assert await fleet.admit(number) == ""
    served = fleet.adoption.served
    assert served is not None
    assert served.contexts == [64, 256] and set(served.usable_contexts()) == {64, 256}
    for backend in fleet.backends[:2]:
        backend.status = fresh("down")  # type: ignore[assignment]
    fleet.adoption.note_contexts()
    assert served.contexts == [64, 256] and not served.usable_contexts()  # they may return
    assert await fleet.admit(2) == ""
    assert fleet.served == "other" and fleet.adoption.served.contexts == [128]
    fleet.backends[2].status = fresh("down")  # type: ignore[assignment]
    assert await fleet.admit(0) == ""
    assert fleet.adoption.served.contexts == [64, 256]
    assert set(fleet.adoption.served.usable_contexts()) == {256}
    del fleet.backends[1]
    fleet.adoption.note_contexts()
    assert fleet.adoption.served.contexts == [256]
    fleet.backends.clear()
    fleet.adoption.note_contexts()  # the last ones are told on
    assert fleet.adoption.served.contexts == [256]


@in_virtual_time
async def test_a_model_is_read_once_a_second_at_most():
    loop, fleet = asyncio.get_running_loop(), Fleet(model_info())
    for epoch in range(3):
        fleet.engines[0].tells["epoch"] = epoch
        await fleet.admit(0)
    assert loop.time() == pytest.approx(2.0, abs=0.01)
    await asyncio.sleep(5.0)
    fleet.engines[0].tells["epoch"] = 9
    await fleet.admit(0)
    assert loop.time() == pytest.approx(7.0, abs=0.01)  # it was long ago


@in_virtual_time
async def test_a_refused_engine_serves_once_its_model_is_the_served_one():
    other, alike = (model_info(name="other", fingerprint=fresh("gg")) for _ in range(2))
    fleet = Fleet(model_info(), other, alike)
    assert await fleet.admit(0) == ""
    assert await fleet.admit(1) != ""
    fleet.backends[0].status = "down"
    assert await fleet.admit(2) == "" and fleet.served == "other"
    assert await fleet.admit(1) == ""

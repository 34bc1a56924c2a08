"""Engines with other KV, and with fewer capabilities, in one fleet."""

from __future__ import annotations

import json
from typing import Any

import pytest
from stub_engine import TOKENIZER, StubEngine, backend_of, model_info
from virtual_time import in_virtual_time

from engine.protocol import ALL_CAPABILITIES, Unsupported
from router.base.errors import Conflict
from router.engines.adoption import Adoption
from router.engines.backend import Backend

# The same words, and so other text for the same tokenizer.
SPACED = json.dumps(json.loads(TOKENIZER), indent=4)
PADDED = json.dumps(
    {
        **json.loads(TOKENIZER),
        "truncation": {"direction": "Right", "max_length": 7, "strategy": "LongestFirst",
                       "stride": 0},
    }
)  # fmt: skip
OTHER_WORDS = TOKENIZER.replace('"w1"', '"v1"')


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
    def uniform(self) -> bool:
        served = self.adoption.served
        assert served is not None
        assert (served.system_fingerprint is not None) == served.uniform
        return served.uniform


@pytest.mark.parametrize("tokenizer", [TOKENIZER, SPACED, PADDED])
@in_virtual_time
async def test_an_engine_with_other_kv_and_the_same_tokenizer_serves(tokenizer):
    other = model_info(fingerprint="g", page_size=32, context_length=64, tokenizer_json=tokenizer)
    fleet = Fleet(model_info(), other)
    assert await fleet.admit(0) == "" and fleet.uniform
    assert await fleet.admit(1) == ""
    first, second = fleet.backends
    assert not fleet.uniform
    assert not first.exchanges_with(second) and first.exchanges_with(first)
    assert "different KV" in first.barrier_to(second) == second.barrier_to(first)
    assert fleet.adoption.served is not None
    assert fleet.adoption.served.contexts == [64, 256]
    assert set(fleet.adoption.served.usable_contexts()) == {64, 256}
    assert [backend for backend, _ in fleet.adoption.serving()] == fleet.backends


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokenizer_json": OTHER_WORDS}, "its fake has another tokenizer"),
        ({"tokenizer_json": "{}"}, "its fake has another tokenizer"),
        ({"eos_token": None}, "its fake has another tokenizer"),
        ({"bos_token": "w1"}, "its fake has another tokenizer"),
        ({"vocab_size": 999}, "another vocabulary or other EOS tokens"),
        ({"eos_token_ids": [0, 1]}, "another vocabulary or other EOS tokens"),
        ({"name": "another"}, "it serves another, not the fake served here"),
    ],
)
@in_virtual_time
async def test_an_engine_of_another_model_is_refused(change, says):
    fleet = Fleet(model_info(), model_info(fingerprint="g", **change), model_info())
    assert await fleet.admit(0) == ""
    for _ in range(3):
        assert says in await fleet.admit(1)
    assert fleet.engines[1].asked["model"] == 1 and fleet.uniform
    assert await fleet.admit(2) == ""


@in_virtual_time
async def test_engines_of_one_kind_have_one_page_size():
    fleet = Fleet(
        model_info(), model_info(fingerprint="g", page_size=32), model_info(fingerprint="g")
    )
    assert [await fleet.admit(number) for number in (0, 1)] == ["", ""]
    assert "page size than others like it" in await fleet.admit(2)


@in_virtual_time
async def test_a_kind_is_forgotten_with_its_last_engine():
    fleet = Fleet(model_info(), model_info(fingerprint="g", page_size=32))
    assert [await fleet.admit(number) for number in (0, 1)] == ["", ""]
    fleet.engines[1].tells["epoch"] = 2  # it restarts as an engine of the first kind
    fleet.engines[1].info = model_info()
    assert await fleet.admit(1) == "" and fleet.uniform
    fleet.engines[1].tells["epoch"] = 3
    fleet.engines[1].info = model_info(fingerprint="g", page_size=64)
    assert await fleet.admit(1) == "" and not fleet.uniform


@in_virtual_time
async def test_engines_of_another_kind_go_on_alone_and_the_first_kind_returns():
    """The model stays the same, so its longest context is that of the engine that is down."""
    fleet = Fleet(model_info(), model_info(fingerprint="g", context_length=64))
    assert [await fleet.admit(number) for number in (0, 1)] == ["", ""]
    fleet.backends[0].status = "down"
    fleet.engines[1].tells["epoch"] = 2
    assert await fleet.admit(1) == ""
    assert fleet.adoption.served is not None
    assert fleet.adoption.served.contexts == [64, 256]
    assert await fleet.admit(0) == ""
    assert fleet.adoption.served.contexts == [64, 256]


@in_virtual_time
async def test_a_refused_engine_is_read_again_when_another_model_is_served():
    fleet = Fleet(model_info(), model_info(name="another", fingerprint="g"),
                  model_info(name="another", fingerprint="h"))  # fmt: skip
    assert await fleet.admit(0) == ""
    assert await fleet.admit(2) != ""
    fleet.backends[0].status = "down"
    assert await fleet.admit(1) == ""
    assert await fleet.admit(2) == ""  # it has the model of the second one


@in_virtual_time
async def test_capabilities_are_those_of_the_process():
    fleet = Fleet(model_info())
    assert await fleet.admit(0) == ""
    (backend,) = fleet.backends
    assert all(backend.can(each) for each in ALL_CAPABILITIES)
    fleet.engines[0].info = model_info(capabilities=["commit", "prep_recv", "commit"])
    fleet.engines[0].tells["epoch"] = 2
    assert await fleet.admit(0) == ""
    assert backend.describe()["capabilities"] == ["prep_recv", "commit"]  # each once, in order
    assert backend.can("commit") and not backend.can("mirror")
    backend.require("prep_recv", "commit")
    with pytest.raises(Unsupported, match="engine e0:1 does not support mirror") as lacks:
        backend.require("commit", "mirror", "pin")
    assert lacks.value.code == "mirror"
    with pytest.raises(ValueError, match="no capability 'fly'; there are: prep_recv"):
        backend.can("fly")  # type: ignore[arg-type]


def test_an_unknown_engine_is_taken_to_be_able():
    """Nothing is sent to it before its model is known."""
    backend: Backend = backend_of(StubEngine())
    assert backend.can("mirror") and backend.describe()["capabilities"] is None
    with pytest.raises(ValueError, match="no capability"):
        backend.can("fly")  # type: ignore[arg-type]


@in_virtual_time
async def test_an_engine_sends_where_it_is_received():
    fleet = Fleet(
        model_info(), model_info(capabilities=["remote_send"]),
        model_info(capabilities=["prep_recv"]), model_info(fingerprint="g"),
    )  # fmt: skip
    for number in range(4):
        assert await fleet.admit(number) == ""
    whole, sender, receiver, other = fleet.backends
    pairs = {
        (one, another)
        for one in fleet.backends
        for another in fleet.backends
        if one is not another and one.sends_to(another)
    }
    assert pairs == {(whole, receiver), (sender, whole), (sender, receiver)}
    assert sender.exchanges_with(receiver) and not other.exchanges_with(whole)

"""Engines of one model with contexts of different length."""

from __future__ import annotations

import asyncio

import pytest
from waiting import until

from engine.protocol import BadRequest
from router.model.served import ServedModel

SMALL, GREAT = 64, 256
FITS_BOTH = {"prompt": [1] * 40, "max_tokens": 10, "temperature": 0}
FITS_ONE = {"prompt": [1] * 40, "max_tokens": 30, "temperature": 0}
FITS_NONE = {"prompt": [1] * 40, "max_tokens": 217, "temperature": 0}


@pytest.fixture
def small(fake):
    engine = fake("small")
    engine.info = engine.info.model_copy(update={"context_length": SMALL})
    return engine


@pytest.fixture
def great(fake):
    return fake("great")


async def drain(r, id: str, draining: bool = True) -> int:
    """Drain an engine; return how many requests were moved."""
    url = f"{r.server.url}/admin/engines/{id}"
    async with r.http.patch(url, json={"draining": draining}) as reply:
        return (await reply.json())["moved"]


@pytest.mark.parametrize(
    ("strategy", "small_first"), [("data_parallel", True), ("prefill_decode", False)]
)
async def test_requests_go_where_they_fit(route, small, great, strategy, small_first):
    """The first engine's context neither refuses nor admits for the others."""
    engines = (small, great) if small_first else (great, small)
    async with route(*engines, strategy=strategy) as r:
        for _ in range(4):
            status, body = await r.post("/v1/completions", FITS_ONE)
            assert (status, body["usage"]["completion_tokens"]) == (200, 30)
        assert not small.calls and len(great.named("start_generate")) == 4
        for _ in range(4):
            assert (await r.post("/v1/completions", FITS_BOTH))[0] == 200
        assert small.calls
        status, body = await r.post("/v1/completions", FITS_NONE)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert str(GREAT) in body["error"]["message"]
        (model,) = (await r.get("/v1/models"))["data"]
        assert model["max_model_len"] == GREAT
        listed = {e["id"]: e["context_length"] for e in (await r.get("/admin/engines"))["engines"]}
        assert listed == {"small": SMALL, "great": GREAT}


async def test_a_request_is_not_moved_to_an_engine_that_cannot_hold_it(route, small, great):
    great.gate = asyncio.Event()
    async with route(small, great) as r:
        await until(lambda: len(r.server.router.registry.usable()) == 2)
        ask = asyncio.create_task(r.post("/v1/completions", FITS_ONE))
        await great.until(lambda: great.running == 1)
        assert await drain(r, "great") == 0
        # Others wait for no engine: the one that could serve them is told apart from none at all.
        status, body = await r.post("/v1/completions", FITS_ONE)
        assert (status, body["error"]["type"]) == (503, "no_engines")
        assert "a context of 70 tokens" in body["error"]["message"]
        great.gate.set()
        assert (await ask)[0] == 200
        assert not small.calls
        status, body = await r.post("/v1/completions", FITS_NONE)
        assert status == 400
        async with r.http.delete(f"{r.server.url}/admin/engines/great"):
            await until(lambda: len(list(r.server.router.registry)) == 1)
        status, body = await r.post("/v1/completions", FITS_ONE)  # nobody can ever serve it now
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert (await r.get("/v1/models"))["data"][0]["max_model_len"] == SMALL


async def test_replicas_are_on_engines_that_can_take_over(route, small, great, fake):
    other = fake("other", gate=asyncio.Event())
    great.gate = asyncio.Event()
    async with route(small, great, other, strategy="replicate") as r:
        await until(lambda: len(r.server.router.registry.usable()) == 3)
        ask = asyncio.create_task(r.post("/v1/completions", FITS_ONE))
        await until(lambda: great.running + other.running == 1)
        await until(lambda: great.named("prep_recv") or other.named("prep_recv"))
        assert not small.calls
        great.gate.set()
        other.gate.set()
        assert (await ask)[0] == 200


async def test_a_chat_without_max_tokens_leaves_as_many_engines_as_it_can(route, small, great):
    messages = [{"role": "user", "content": "w1 w2"}]
    great.info = great.info.model_copy(update={"context_length": SMALL + 4})
    async with route(small, great) as r:
        await until(lambda: len(r.server.router.registry.usable()) == 2)
        used = [
            (await r.post("/v1/chat/completions", {"messages": messages}))[1]["usage"]
            for _ in range(4)
        ]
        assert {usage["total_tokens"] for usage in used} == {SMALL}
        assert small.calls and great.calls
        await drain(r, "small")
        _, body = await r.post("/v1/chat/completions", {"messages": messages})
        assert body["usage"]["total_tokens"] == SMALL + 4


@pytest.mark.parametrize(
    ("prompt", "room"), [(10, 54), (40, 60), (63, 37), (64, 36), (99, 157), (250, 6)]
)
def test_the_room_without_max_tokens(fake, prompt: int, room: int):
    """At least half of what the longest context leaves."""
    model = ServedModel(fake("a").info)
    model.contexts = [SMALL, 100, GREAT]
    model.usable_contexts = lambda: {64, 100} if prompt < 99 else {64, 100, 256}
    assert model.room(prompt, None, param="prompt") == room
    assert model.room(prompt, 6, param="prompt") == 6
    with pytest.raises(BadRequest):
        model.room(GREAT, None, param="prompt")
    model.usable_contexts = lambda: set[int]()  # none is up now
    assert model.room(prompt, None, param="prompt") == GREAT - prompt

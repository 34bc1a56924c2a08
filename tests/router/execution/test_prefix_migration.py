"""Context migration by an admin and by `migrate`: real engines, and scripted ones that fail."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from waiting import until

from engine.protocol import NoCapacity, Sampling, page_names
from router.base.errors import EngineUnreachable
from router.base.ids import EngineId
from router.base.request import Request

NEW = 12
salts = itertools.count(1)


def prompt(length: int) -> list[int]:
    """Return a prompt that is in no cache."""
    salt = next(salts)
    return [(salt * 41 + 11 * i * i + 5 * i) % 500 + 1 for i in range(length)]


@pytest.fixture
def route_real(route_real):
    """Tolerate engines that are silent for a while, as on a busy machine."""
    return partial(route_real, health_timeout_s=20.0)


async def ask(r, tokens: list[int], **fields: Any) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the tokens of a greedy answer, and its legs."""
    body = {
        "prompt": tokens, "max_tokens": NEW, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **fields,
    }  # fmt: skip
    name = f"migrate-{next(salts)}"
    status, answer = await r.post("/v1/completions", body, headers={"X-Request-Id": name})
    assert status == 200, answer
    return answer["choices"][0]["token_ids"], (await r.receipt(name))["legs"]


async def alone(r, engine: str, tokens: list[int]) -> list[int]:
    """Return the tokens of a greedy answer of one engine, without the router."""
    backend = r.server.router.registry[engine]
    body = {
        "request_id": f"alone-{next(salts)}", "prompt": tokens, "temperature": 0.0,
        "max_tokens": NEW, "ignore_eos": True,
    }  # fmt: skip
    async with r.http.post(f"{backend.url}/microserving/start_generate", json=body) as reply:
        events = [json.loads(line[6:]) for line in (await reply.text()).splitlines() if line]
    return [token for event in events for token in event["token_ids"]]


@asynccontextmanager
async def busy(r, engine: str) -> AsyncIterator[None]:
    """Keep a generation running on `engine`."""
    tokens, registry = prompt(200), r.server.router.registry
    await alone(r, engine, tokens)
    asked = Request("id", tokens, Sampling())
    await until(lambda: registry.prefixes.cached(registry[engine], asked, 200, coming=False))
    # A poll while `alone` ran makes that the work of another router, which `migrate` would avoid.
    await until(lambda: r.idle() and not any(backend.load.total for backend in registry))
    body = {"prompt": tokens, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    async with r.http.post(r.server.url + "/v1/completions", json=body) as response:
        await response.content.readany()
        assert registry[engine].load.streams == 1
        yield


def other(engine: str) -> str:
    return {"engine-0": "engine-1", "engine-1": "engine-0"}[engine]


def migration(prefix: Any, source: str, target: str, **fields: Any) -> dict[str, Any]:
    return {"prefix": prefix, "from": source, "to": target, **fields}


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["cache_aware", "migrate"])
async def test_a_topic_is_migrated_to_another_engine(route_real, strategy):
    """Example 4: one engine serves a topic; when it is overloaded, another gets the topic too."""
    topic = prompt(330)
    async with route_real(strategy=strategy) as r:
        await ask(r, [1, 2, 3])  # from the first query on the router follows the engines
        _, (leg,) = await ask(r, [*topic, 7, 8, 9])
        source, target = leg["engine"], other(leg["engine"])
        answer, (leg,) = await ask(r, [*topic, 17, 18, 19])
        assert (leg["engine"], leg["begin"]) == (source, 320)

        kv_bytes = r.server.router.registry.model.info.kv_bytes_per_token
        status, moved = await r.post("/admin/migrate", migration(topic, source, target, pin=True))
        assert status == 200, moved
        assert moved.pop("ms") > 0
        assert moved == {
            "tokens": 320, "sent_tokens": 320, "bytes": 320 * kv_bytes, "pinned": 320,
        }  # fmt: skip

        question = [*topic, 27, 28, 29]
        async with busy(r, source):
            tokens, (leg,) = await ask(r, question)
            assert (leg["call"], leg["engine"]) == ("start_generate", target)
            assert (leg["begin"], leg["computed_tokens"]) == (320, 13)
            again, (leg,) = await ask(r, [*topic, 17, 18, 19])
            assert (leg["engine"], again) == (target, answer)
        assert tokens == await alone(r, source, question)
        assert len(set(tokens)) > 5
        await r.settled()


@pytest.mark.processes
async def test_migrating_again_sends_the_missing_pages_and_moves_the_pin(route_real):
    topic = prompt(100)
    async with route_real() as r:
        await alone(r, "engine-0", topic[:70])
        await alone(r, "engine-1", topic[:40])

        async def pinned(engine: str) -> int:
            state = await r.server.router.registry[engine].client.state()
            return state.pages.pinned

        before = [await pinned("engine-0"), await pinned("engine-1")]
        there = migration(topic, "engine-0", "engine-1", pin=True)
        _, moved = await r.post("/admin/migrate", there)
        assert (moved["tokens"], moved["sent_tokens"], moved["pinned"]) == (64, 32, 64)
        assert [await pinned("engine-0"), await pinned("engine-1")] == [before[0], before[1] + 4]
        _, moved = await r.post("/admin/migrate", there)
        assert (moved["tokens"], moved["sent_tokens"], moved["bytes"]) == (64, 0, 0)
        back = migration(topic, "engine-1", "engine-0", pin=True)
        _, moved = await r.post("/admin/migrate", back)
        assert (moved["tokens"], moved["sent_tokens"], moved["pinned"]) == (64, 0, 64)
        assert [await pinned("engine-0"), await pinned("engine-1")] == [before[0] + 4, before[1]]


@pytest.mark.processes
async def test_a_prefix_may_be_text_and_is_audited(route_real):
    text = "".join(chr(97 + token % 26) for token in prompt(60))
    async with route_real() as r:
        model = r.server.router.registry.model
        await alone(r, "engine-0", model.encode(text))
        with r.server.router.events.listening(lambda: None) as listener:
            status, moved = await r.post("/admin/migrate", migration(text, "engine-0", "engine-1"))
            assert status == 200, moved
            event = await anext(listener.frames(10))
        assert moved["tokens"] == len(model.encode(text)) // 16 * 16 > 0
        told = {"from": "engine-0", "to": "engine-1", **moved}
        assert b"event: migration\n" in event
        data = json.loads(event.split(b"data: ")[1])
        assert {name: data[name] for name in told} == told
        entry = (await r.get("/admin/audit"))["entries"][-1]
        assert (entry["what"], entry["who"]) == ("migrated", "127.0.0.1")
        assert {name: entry[name] for name in told} == told


@pytest.mark.processes
@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"from": "nobody"}, 404, "from"),
        ({"to": "nobody"}, 404, "to"),
        ({"to": "engine-0"}, 400, "to"),
        ({"prefix": ""}, 400, "prefix"),
        ({"prefix": []}, 400, "prefix"),
        ({"prefix": [1, 1 << 30] * 20}, 400, "prefix"),
        ({"prefix": [-1] * 20}, 400, "prefix"),
        ({"prefix": [499] * 15}, 400, "prefix"),
        ({"prefix": [498] * 100}, 400, "prefix"),
        ({"prefix": 5}, 400, None),
        ({"pin": "yes"}, 400, "pin"),
        ({"lease": 5}, 400, "lease"),
    ],
)
async def test_a_bad_migration_names_its_parameter(route_real, changes, status, param):
    async with route_real() as r:
        await alone(r, "engine-0", [499] * 20)
        body = migration([499] * 20, "engine-0", "engine-1") | changes
        answered, error = await r.post("/admin/migrate", body)
        assert answered == status, error
        assert param is None or error["error"]["param"] == param


@pytest.fixture
def scripted(fake):
    """Two engines; the first has 64 tokens cached."""
    topic = list(range(64))
    return topic, fake("a", cached=page_names(topic, 16)), fake("b")


async def test_migrated_pages_count_at_once(route, scripted):
    """Only pages cached by the sender are moved, and they count once committed."""
    topic, source, target = scripted
    asked = Request("id", [*topic, *topic], Sampling())
    async with route(source, target) as r:
        prefixes = r.server.router.registry.prefixes
        a, b = r.server.router.registry
        for backend in (a, b):
            await prefixes.known(backend)
        with prefixes.expect(a, asked, 128):
            status, moved = await r.post("/admin/migrate", migration(asked.tokens, "a", "b"))
            assert status == 200, moved
        assert moved["tokens"] == prefixes.cached(b, asked, 128) == 64


async def test_no_room_is_a_429_and_leaves_no_lease(route, scripted):
    topic, source, target = scripted
    target.refuse["prep_recv"] = [NoCapacity("full", retry_after_s=3)]
    async with route(source, target) as r:
        body = migration(topic, "a", "b")
        async with r.http.post(r.server.url + "/admin/migrate", json=body) as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (429, "3")
        assert not source.calls
        assert (await r.get("/admin/audit"))["entries"][-1]["what"] != "migrated"
        await r.settled()


async def test_a_send_that_fails_ends_the_lease(route, scripted):
    topic, source, target = scripted
    source.refuse["remote_send"] = [EngineUnreachable("it has gone")]
    async with route(source, target) as r:
        status, error = await r.post("/admin/migrate", migration(topic, "a", "b"))
        assert status == 502, error
        assert not target.leases
        assert not target.named("commit")
        await r.settled()


async def test_an_admins_disconnect_ends_lease_and_send(route, scripted):
    topic, source, target = scripted
    source.send_gate = asyncio.Event()
    async with route(source, target) as r:
        body = migration(topic, "a", "b")
        asking = asyncio.create_task(r.post("/admin/migrate", body))
        await source.until(lambda: source.named("remote_send"))
        asking.cancel()
        await target.until(lambda: not target.leases)
        await source.until(lambda: source.named("release"))
        source.send_gate.set()
        await r.settled()


async def test_a_migration_has_a_deadline(route, scripted):
    topic, source, target = scripted
    source.send_gate = asyncio.Event()
    async with route(source, target, request_timeout_s=0.2) as r:
        status, error = await r.post("/admin/migrate", migration(topic, "a", "b"))
        assert (status, error["error"]["type"]) == (504, "timeout")
        await target.until(lambda: not target.leases)
        source.send_gate.set()


async def test_down_and_draining_engines_receive_no_prefix(route, scripted):
    topic, source, target = scripted
    async with route(source, target) as r:
        r.server.router.registry[EngineId("b")].draining = True
        status, error = await r.post("/admin/migrate", migration(topic, "a", "b"))
        assert (status, error["error"]["param"]) == (409, "to")
        r.server.router.registry[EngineId("b")].draining = False
        source.silent = True
        await asyncio.sleep(0.2)  # the answer to an earlier health check would bring it up again
        r.server.router.registry[EngineId("a")].go_down("silent")
        status, error = await r.post("/admin/migrate", migration(topic, "a", "b"))
        assert status == 502, error
        assert not target.leases


@pytest.mark.processes
async def test_migrate_moves_a_prefix_from_an_overloaded_engine(route_real):
    """`migrate` moves a prefix only under overload, only once, and the tokens are the same."""
    topic = prompt(200)
    async with route_real(strategy="migrate", params={"overload": 0}) as r:
        await ask(r, [1, 2, 3])
        _, (leg,) = await ask(r, [*topic, 7, 8, 9])
        source, target = leg["engine"], other(leg["engine"])
        question = [*topic, 17, 18, 19]
        async with busy(r, source):
            tokens, legs = await ask(r, question)
            assert [(leg["call"], leg["engine"]) for leg in legs] == [
                ("prep_recv", target),
                ("remote_send", source),
                ("commit", target),
                ("start_generate", target),
            ]
            assert (legs[1]["sent_tokens"], legs[1]["computed_tokens"]) == (192, 0)
            assert (legs[3]["begin"], legs[3]["computed_tokens"]) == (192, 11)
            _, legs = await ask(r, [*topic, 27, 28, 29])
            assert [(leg["call"], leg["engine"]) for leg in legs] == [("start_generate", target)]
        assert tokens == await alone(r, source, question)
        await r.settled()


@pytest.mark.processes
async def test_migrate_moves_nothing_without_overload(route_real):
    topic = prompt(200)
    async with route_real(strategy="migrate", params={"overload": 32}) as r:
        await ask(r, [1, 2, 3])
        _, (leg,) = await ask(r, [*topic, 7, 8, 9])
        source = leg["engine"]
        async with busy(r, source):
            _, (leg,) = await ask(r, [*topic, 17, 18, 19])
            assert (leg["engine"], leg["begin"]) == (source, 192)


@pytest.mark.processes
async def test_a_session_stays_on_its_engine(route_real):
    """Each request of a session reuses the KV that the one before has cached."""
    async with route_real(strategy="cache_aware") as r:
        await ask(r, [1, 2, 3])
        places = set()
        for _ in range(2):
            turns, engines = prompt(40), []
            for _ in range(3):
                answer, (leg,) = await ask(r, turns)
                engines.append(leg["engine"])
                turns = [*turns, *answer, *prompt(20)]
            assert len(set(engines)) == 1
            places.add(engines[0])
            assert leg["begin"] >= 80
        assert len(places) == 2  # ties alternate

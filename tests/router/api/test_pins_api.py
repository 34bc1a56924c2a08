"""The admin API's pins, in front of real engines."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from typing import Any

import pytest
from waiting import until

from engine.protocol import Sampling
from router.base import Request

pytestmark = pytest.mark.processes
salts = itertools.count(1)
HALF = 2048 // 2 * 16  # tokens that an engine of 2048 pages lets be pinned


def prompt(length: int) -> list[int]:
    """Return a prompt that is in no cache."""
    salt = next(salts)
    return [(salt * 43 + 11 * i * i + 3 * i) % 500 + 1 for i in range(length)]


@pytest.fixture
def route_real(route_real):
    """Tolerate engines that are silent for a while, as on a busy machine."""
    return partial(route_real, health_timeout_s=20.0)


async def post(r, name: str, status: int = 200, **body: Any) -> dict[str, Any]:
    answered, reply = await r.post(f"/admin/{name}", body)
    assert answered == status, reply
    return reply


async def listed(r) -> list[dict[str, Any]]:
    return (await r.get("/admin/pins"))["pins"]


async def reached(r, state: str) -> dict[str, Any]:
    """Wait until the only pin has this state; return it."""
    (pin,) = r.server.router.pins
    await until(lambda: pin.state == state)
    (told,) = await listed(r)
    return told


async def pinned(r, engine: str) -> int:
    return (await r.server.router.registry[engine].client.state()).pages.pinned


async def test_text_is_pinned_listed_and_unpinned(route_real):
    text = "".join(chr(97 + token % 26) for token in prompt(100))
    async with route_real() as r:
        tokens = r.server.router.registry.model.encode(text)
        full = len(tokens) // 16 * 16
        before = await pinned(r, "engine-0")
        with r.server.router.events.listening(lambda: None) as listener:
            told = await post(r, "pin", prefix=text, engine="engine-0")
            assert told["state"] == "copying" and told["present"] == []
            told = await reached(r, "pinned")
            event = await anext(listener.frames(10))
        assert b"event: pin\n" in event and told["id"].encode() in event
        assert told.pop("since") > 0 and len(told.pop("id")) == 16
        assert told == {
            "prefix": text[:80], "tokens": full, "copies": 1, "engines": ["engine-0"],
            "present": ["engine-0"], "state": "pinned", "error": None,
        }  # fmt: skip
        assert await pinned(r, "engine-0") == before + full // 16
        again = await post(r, "pin", prefix=tokens)  # the same pages; nothing new is wanted
        assert again["engines"] == ["engine-0"] and again["state"] == "pinned"
        assert len(await listed(r)) == 1
        unpinned = await post(r, "unpin", prefix=text)
        assert unpinned["copies"] == 0
        await until(lambda: not list(r.server.router.pins))
        assert await pinned(r, "engine-0") == before
        assert (await post(r, "unpin", 404, prefix=text))["error"]["param"] == "prefix"
        entries = (await r.get("/admin/audit"))["entries"]
        assert [each["what"] for each in entries][-3:] == ["pinned", "pinned", "unpinned"]
        assert entries[-3]["who"] == "127.0.0.1"
        assert (entries[-3]["id"], entries[-3]["engines"]) == (again["id"], ["engine-0"])


async def test_copies_are_counted_in_metrics_and_unpinned_by_id(route_real):
    async with route_real() as r:
        told = await post(r, "pin", prefix=prompt(64), copies=2)
        assert told["prefix"]  # the text of its first tokens
        assert (await reached(r, "pinned"))["present"] == ["engine-0", "engine-1"]
        async with r.http.get(r.server.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        for name in ("pinned_prefixes 1", "pin_copies_wanted 2", "pin_copies 2"):
            assert f"microserve_router_{name}.0" in lines
        assert (await post(r, "unpin", id=told["id"], copies=1))["copies"] == 1
        await until(lambda: sum(len(pin.present()) for pin in r.server.router.pins) == 1)
        await post(r, "unpin", id=told["id"])
        await until(lambda: not list(r.server.router.pins))


async def test_a_pin_survives_a_migration_that_takes_its_pin_away(route_real):
    tokens = prompt(96)
    async with route_real() as r:
        before = await pinned(r, "engine-0")
        await post(r, "pin", prefix=tokens, engine="engine-0")
        await reached(r, "pinned")
        registry = r.server.router.registry
        asked = Request("id", tokens, Sampling())
        # The router hears from the engine what it has cached a little later.
        await until(lambda: registry.prefixes.cached(registry["engine-0"], asked, 96, coming=False))
        moved = {"prefix": tokens, "from": "engine-0", "to": "engine-1", "pin": True}
        assert (await post(r, "migrate", **moved))["pinned"] == 96
        async with asyncio.timeout(20):
            while await pinned(r, "engine-0") != before + 6:
                pass
        status, _ = await r.post("/admin/migrate", moved | {"from": "engine-1", "to": "engine-0"})
        assert status == 200


@pytest.mark.parametrize(
    ("call", "body", "status", "param"),
    [
        ("pin", {}, 400, "prefix"),
        ("pin", {"prefix": ""}, 400, "prefix"),
        ("pin", {"prefix": 5}, 400, None),
        ("pin", {"prefix": [1] * 15}, 400, "prefix"),
        ("pin", {"prefix": [1, 1 << 30] * 20}, 400, "prefix"),
        ("pin", {"prefix": [1] * (HALF + 16)}, 400, "prefix"),
        ("pin", {"prefix": [1] * 16, "copies": 0}, 400, "copies"),
        ("pin", {"prefix": [1] * 16, "copies": 5000}, 400, "copies"),
        ("pin", {"prefix": [1] * 16, "copies": "2"}, 400, "copies"),
        ("pin", {"prefix": [1] * 16, "copies": 1, "engine": "engine-0"}, 400, "copies"),
        ("pin", {"prefix": [1] * 16, "engine": "nobody"}, 404, "engine"),
        ("pin", {"prefix": [1] * 16, "more": 1}, 400, "more"),
        ("unpin", {}, 400, "prefix"),
        ("unpin", {"prefix": [1] * 16, "id": "x"}, 400, "prefix"),
        ("unpin", {"prefix": [1] * 16}, 404, "prefix"),
        ("unpin", {"id": "0" * 16}, 404, "prefix"),
    ],
)
async def test_a_bad_call_names_its_parameter(route_real, call, body, status, param):
    async with route_real() as r:
        error = (await post(r, call, status, **body))["error"]
        assert param is None or error["param"] == param, error
        assert await listed(r) == []


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        ([], "the prompt is empty"),
        (None, "prefix: want text, or a list of token ids"),
        (7, "prefix: want text, or a list of token ids"),
        ([1, 2, "x"], "prefix: element 2 is text, not a token id"),
        ([1, 2.5], "prefix: element 1 is no integer of 64 bits, not a token id"),
        ([True], "prefix: element 0 is a boolean, not a token id"),
        ([1, [2]], "prefix: element 1 is a list, not a token id"),
        ([None], "prefix: element 0 is null, not a token id"),
        ([1, 2, -3], "token ids must be from 0 to 999, but element 2 is -3"),
        ([1, 1000], "token ids must be from 0 to 999, but element 1 is 1000"),
        ([10**30], "prefix: element 0 is no integer of 64 bits, not a token id"),
        ([1] * (2**20 + 1), "prefix: 1048577 token ids are more than 1048576"),
        (["x"] * 1_000_000, "prefix: element 0 is text, not a token id"),
    ],
    ids=[str(number) for number in range(13)],
)
async def test_a_bad_prefix_names_its_first_bad_element(route, fake, prefix, said):
    async with route(fake("a")) as r:
        for call in ("pin", "unpin"):
            if (call, prefix) != ("unpin", None):
                error = (await post(r, call, 400, prefix=prefix))["error"]
                assert (error["message"], error["param"]) == (said, "prefix")


async def test_a_body_of_half_a_million_fields_is_refused_by_their_number(route, fake):
    async with route(fake("a")) as r:
        body = dict.fromkeys(map(str, range(500_000)), 1)
        error = (await post(r, "pin", 400, **body))["error"]
        assert error["message"] == "the body has 500000 fields; no call has more than 64"


async def test_without_engines_nothing_can_be_pinned(route):
    async with route() as r:
        assert (await post(r, "pin", 503, prefix="w1 " * 20))["error"]["type"] == "no_engines"
        assert await listed(r) == []


async def test_the_number_of_pins_is_configured(route_real):
    async with route_real(max_pins=1) as r:
        tokens = prompt(32)
        await post(r, "pin", prefix=tokens)
        await post(r, "pin", prefix=tokens, copies=2)  # known already
        async with r.http.post(
            r.server.url + "/admin/pin", json={"prefix": prompt(32)}
        ) as response:
            assert response.status == 429 and "Retry-After" in response.headers

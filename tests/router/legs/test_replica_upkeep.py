"""How the router keeps a generation's replica, with scripted engines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from waiting import until

from engine.protocol import BadAddress, NoCapacity, UnknownLease
from router import Mirror, strategy

pytestmark = pytest.mark.slow  # all of them: each waits a little

PROMPT = list(range(1, 41))
ASK = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "return_token_ids": True}
TOKENS = [140, 141, 142, 143, 144]


@strategy
async def on_a(request: Any, cluster: Any, *, avoid: str = ""):
    """Generate on `a`, the first engine; avoid `avoid` for the replica."""
    kv = cluster.replica
    engine = kv.engine if kv else next(iter(cluster.engines))
    mirror = Mirror(4, key=(lambda other: other.id == avoid) if avoid else None)
    async for chunk in engine.start_generate(request, kv=kv, mirror=mirror):
        yield chunk


@pytest.fixture
async def three(route: Any, fake: Any) -> Any:
    """Yield a router with engines `a`, `b`, `c`; generations on `a` wait after one token."""
    a, b, c = fake("a", gate=asyncio.Event()), fake("b"), fake("c")
    async with route(a, b, c, health_timeout_s=0.5) as r:
        await until(lambda: [m.id for m in r.server.router.registry] == ["a", "b", "c"])
        r.use(on_a)
        yield r, a, b, c
        await r.settled()
        assert not b.leases and not c.leases


async def asked(r: Any, **headers: str) -> asyncio.Task[Any]:
    headers = {"X-Request-Id": "x", **headers}
    return asyncio.create_task(r.post("/v1/completions", ASK, headers=headers))


async def answered(ask: asyncio.Task[Any]) -> None:
    status, body = await ask
    assert (status, body["choices"][0]["token_ids"]) == (200, TOKENS)


async def drain(r: Any, name: str) -> Any:
    async with r.http.patch(f"{r.server.url}/admin/engines/{name}", json={"draining": True}) as got:
        return await got.json()


def leg(r: Any) -> Any:
    """The leg of the only generation."""
    return r.server.router.receipts["x"].legs[0]


async def test_the_replica_is_on_the_next_engine_and_ends_with_the_request(three):
    r, a, b, c = three
    ask = await asked(r)
    await a.until(lambda: a.running)
    (prep,), (start,) = b.named("prep_recv"), a.named("start_generate")
    assert (prep["prompt"], prep["end"], prep["reserve"]) == (PROMPT, 40, 5)
    assert prep["request_id"] != start["request_id"]
    assert start["mirror"] == {"kv_addr": "addr-b-1", "every": 4}
    described = {one["id"]: one for one in (await r.get("/admin/engines"))["engines"]}
    assert described["a"]["mirrored"]["to"] == {"b": 1}
    assert described["b"]["replicas"] == 1
    assert b.leases == {"b-1"} and not c.calls
    a.gate.set()
    await answered(ask)
    await b.until(lambda: not b.leases)
    assert b.named("release") == [{"lease_id": "b-1"}]
    described = {one["id"]: one for one in (await r.get("/admin/engines"))["engines"]}
    assert described["a"]["mirrored"]["requests"] == described["b"]["replicas"] == 0


async def test_the_avoid_key_excludes_an_engine(three):
    r, a, b, c = three
    r.use(on_a, avoid="b")
    a.gate.set()
    await answered(await asked(r))
    assert c.named("prep_recv") and not b.calls


async def test_a_disconnect_ends_the_replica(three):
    r, a, b, _ = three
    ask = await asked(r)
    await a.until(lambda: a.running)
    ask.cancel()
    await b.until(lambda: not b.leases)
    a.gate.set()


async def test_an_engine_without_room_is_skipped(three):
    """The stream does not wait for it: the replica is opened while it runs."""
    r, a, b, c = three
    b.refuse["prep_recv"] = [NoCapacity("full", retry_after_s=1)] * 2
    ask = await asked(r)
    await a.until(lambda: a.named("mirror"))
    (start,), (mirror,) = a.named("start_generate"), a.named("mirror")
    assert "mirror" not in start
    assert mirror == {"request_id": start["request_id"], "kv_addr": "addr-c-1", "every": 4}
    # Its prompt includes the tokens emitted by then.
    (prep,) = c.named("prep_recv")
    assert prep["prompt"] == (PROMPT + TOKENS)[: prep["end"]] and prep["end"] >= 40
    a.gate.set()
    await answered(ask)
    receipt = await r.receipt("x")
    (leg,) = receipt["legs"]
    assert (leg["replica"], leg["mirror_error"], receipt["fallbacks"]) == ("c", None, [])


async def test_an_engine_that_hangs_is_skipped(three, monkeypatch):
    monkeypatch.setattr("router.legs.replica_upkeep.OPEN_S", 0.02)
    monkeypatch.setattr("router.legs.replica_upkeep.REOPEN_S", 0.02)
    r, a, b, _ = three
    b.prep_gate = asyncio.Event()
    ask = await asked(r)
    await a.until(lambda: a.named("mirror"))
    assert "mirror" not in a.named("start_generate")[0]
    assert a.named("mirror")[0]["kv_addr"].startswith("addr-c")
    assert {"request_id": b.named("prep_recv")[0]["request_id"]} in b.named("release")
    a.gate.set()
    await answered(ask)
    b.prep_gate.set()


async def test_an_engine_that_refuses_the_mirror_generates_without_it(three):
    r, a, _, _ = three
    a.refuse["start_generate"] = [BadAddress("not ours", param="kv_addr")]
    a.refuse["mirror"] = [BadAddress("not ours", param="kv_addr")] * 9
    a.gate.set()
    await answered(await asked(r))
    first, second = a.named("start_generate")
    assert "mirror" in first and "mirror" not in second
    receipt = await r.receipt("x")
    assert receipt["legs"][0]["mirror_error"] == "bad_address" and not receipt["retries"]


async def test_draining_a_replicas_engine_replaces_the_replica(three):
    r, a, b, c = three
    ask = await asked(r)
    await a.until(lambda: a.running)
    assert (await drain(r, "b"))["moved"] == 0
    await b.until(lambda: not b.leases)
    assert [body["kv_addr"] for body in a.named("mirror")] == ["addr-c-1"]
    assert c.leases == {"c-1"}
    a.gate.set()
    await answered(ask)


async def test_a_full_replica_is_kept_until_its_successor_is_open(three, monkeypatch):
    monkeypatch.setattr("router.legs.replica_upkeep.RETRY_S", 0.02)
    r, a, b, c = three
    a.tells = {
        "mirror": {"lease_id": "b-1", "landed": 40, "stopped": "no_capacity", "message": "why"}
    }
    c.refuse["prep_recv"] = [NoCapacity("full", retry_after_s=1)]
    ask = await asked(r)
    await c.until(lambda: len(c.named("prep_recv")) == 1)
    assert b.leases == {"b-1"}
    assert (await r.receipt("x"))["legs"][0]["landed"] == 40
    await a.until(lambda: a.named("mirror"))
    await b.until(lambda: not b.leases)
    assert c.leases == {"c-2"}
    a.tells = {}
    a.gate.set()
    await answered(ask)
    assert (await r.receipt("x"))["fallbacks"] == ["unmirrored"]  # until the new replica was open


@pytest.mark.parametrize("which", [{"lease_id": "b-1"}, {}])
async def test_an_expired_replica_is_replaced_at_once(three, which):
    """This holds also for an older engine, whose event does not name the lease."""
    r, a, b, _ = three
    a.tells = {"mirror": {**which, "landed": 40, "stopped": "lease_expired", "message": "why"}}
    ask = await asked(r)
    await a.until(lambda: a.named("mirror"))
    await b.until(lambda: {"lease_id": "b-1"} in b.named("release"))
    assert a.named("mirror")[0]["kv_addr"] == f"addr-{next(iter(b.leases))}"
    a.tells = {}
    a.gate.set()
    await answered(ask)


async def test_late_events_of_an_old_replica_are_ignored(three):
    """Events about the old mirror may still arrive after another mirror has begun."""
    r, a, _, c = three
    ask = await asked(r)
    await a.until(lambda: a.running)
    await drain(r, "b")
    await until(lambda: leg(r).replica == "c")
    a.tells = {"mirror": {"lease_id": "b-1", "landed": 41, "stopped": "lease_expired"}}
    a.gate.set()
    await answered(ask)
    assert leg(r).landed == 0 and leg(r).mirror_error is None
    assert len(a.named("mirror")) == len(c.named("prep_recv")) == 1


async def test_early_events_of_a_new_replica_are_applied_later(three):
    """The mirror stops before the router has read the reply to the call that began it."""
    r, a, _, c = three
    ask = await asked(r)
    await a.until(lambda: a.running)
    a.mirror_gate = asyncio.Event()
    await drain(r, "b")
    await a.until(lambda: a.named("mirror"))
    a.tells = {"mirror": {"lease_id": "c-1", "landed": 41, "stopped": "lease_expired"}}
    a.gate.set()
    a.gate.clear()  # one token
    await until(lambda: leg(r).tokens == 2)
    a.mirror_gate.set()
    await c.until(lambda: {"lease_id": "c-1"} in c.named("release"))
    await a.until(lambda: len(a.named("mirror")) == 2)
    a.tells = {}
    a.gate.set()
    await answered(ask)


@pytest.mark.parametrize("how", ["silent", "restarted"])
async def test_a_replica_is_replaced_when_its_engine_is_silent_or_restarted(three, how: str):
    """Puts into a stopped engine's memory succeed, so only the router notices that it is silent."""
    r, a, b, _ = three
    ask = await asked(r)
    await a.until(lambda: a.running)
    if how == "silent":
        b.silent = True
    else:
        b.epoch += 1
        b.leases.clear()
    await a.until(lambda: a.named("mirror"))
    address = a.named("mirror")[0]["kv_addr"]
    assert address == "addr-c-1" if how == "silent" else address.startswith("addr-b")
    b.silent = False
    a.gate.set()
    await answered(ask)
    b.leases.discard("b-1")  # the lease of a silent engine expires


async def test_an_unknown_replica_lease_is_offered_once(three):
    """The replica's engine does not know the lease; the next attempt computes everything."""
    r, a, b, _ = three
    b.refuse["start_generate"] = [UnknownLease("gone", param="lease_id")]
    a.break_after = [2]
    ask = await asked(r)
    await a.until(lambda: a.running)
    # On a busy host the replica may be there only when the stream has begun.
    await a.until(lambda: "mirror" in a.named("start_generate")[0] or a.named("mirror"))
    a.gate.set()
    await answered(ask)
    b.leases.discard("b-1")  # it has reported the lease as unknown
    starts = [body for engine in three[1:] for body in engine.named("start_generate")]
    assert [body.get("lease_id") for body in b.named("start_generate")][:1] == ["b-1"]
    assert sum("lease_id" in body for body in starts) == 1
    assert "begin" not in b.named("start_generate")[0]


def test_every_is_a_number_of_tokens():
    with pytest.raises(ValueError, match="every"):
        Mirror(every=0)


async def test_a_replica_whose_lease_breaks_the_protocol_is_released(three):
    """The engine holds pages for it, although the router cannot use it."""
    r, a, b, _ = three
    b.prep_tells = {"match_len": 4000}
    ask = await asked(r)
    await a.until(lambda: a.named("mirror"))  # to the next engine
    await b.until(lambda: not b.leases)
    assert b.named("prep_recv") and b.named("release")
    a.gate.set()
    await answered(ask)

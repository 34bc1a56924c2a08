"""The move of a generation with its KV to another engine: its calls and failures, with scripted
engines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from waiting import until

from engine.protocol import BadAddress, Internal, NoCapacity

PROMPT = list(range(1, 41))
ASK = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "return_token_ids": True}
TOKENS = list(range(140, 160))


@pytest.fixture
async def pair(route: Any, fake: Any) -> Any:
    """Yield a router with engines `a` and `b`; generations on `a` wait after one token."""
    a, b = fake("a", gate=asyncio.Event()), fake("b", match_len=16)
    async with route(a, b) as r:
        await until(lambda: [m.id for m in r.server.router.registry] == ["a", "b"])
        yield r, a, b
        await r.settled()
        assert not a.leases and not b.leases and not a.running and not b.running


async def drained(r: Any, a: Any) -> dict[str, Any]:
    """Drain `a` after the first token of a request there; return the receipt."""
    headers = {"X-Request-Id": "x"}
    ask = asyncio.create_task(r.post("/v1/completions", ASK, headers=headers))
    await a.until(lambda: a.running)
    url = f"{r.server.url}/admin/engines/a"
    async with r.http.patch(url, json={"draining": True}) as reply:
        assert (await reply.json())["moved"] == 1
    status, body = await ask
    assert (status, body["choices"][0]["token_ids"]) == (200, TOKENS)
    return await r.receipt("x")


async def test_full_pages_are_sent_and_the_rest_is_computed(pair):
    r, a, b = pair
    receipt = await drained(r, a)
    tokens = PROMPT + TOKENS[:1]
    (prep,), (send,), (start,) = (
        b.named("prep_recv"), a.named("remote_send"), b.named("start_generate"),
    )  # fmt: skip
    assert (prep["prompt"], prep["end"]) == (tokens, 32)
    assert (send["prompt"], send["begin"], send["end"]) == (tokens, 16, 32)
    assert (start["prompt"], start["output"]) == (PROMPT, TOKENS[:1])
    assert (start["begin"], start["lease_id"]) == (32, "b-1")
    # The old engine has cached its pages before it is asked to send them.
    calls = [name for name, _ in a.calls]
    assert calls.index("release") < calls.index("remote_send")
    assert [leg["call"] for leg in receipt["legs"]] == [
        "start_generate", "prep_recv", "remote_send", "start_generate",
    ]  # fmt: skip
    assert receipt["legs"][-1]["recomputed_tokens"] == 41 - 32


async def test_pages_cached_by_the_target_are_not_sent(pair):
    r, a, b = pair
    b.match_len = 64
    await drained(r, a)
    assert not a.named("remote_send")
    assert b.named("start_generate")[0]["begin"] == 32


async def test_a_move_waits_for_room_and_still_sends_the_kv(pair):
    r, a, b = pair
    b.refuse["prep_recv"] = [NoCapacity("full", retry_after_s=0.01)] * 2
    receipt = await drained(r, a)
    assert len(b.named("prep_recv")) == 3 and len(a.named("remote_send")) == 1
    assert receipt["waits"] == 2 and len(receipt["retries"]) == 1


async def test_after_a_failed_send_the_strategy_runs_again(pair):
    r, a, b = pair
    a.refuse["remote_send"] = [Internal("no")]
    receipt = await drained(r, a)
    assert [retry["error"]["type"] for retry in receipt["retries"]] == ["draining", "internal"]
    (start,) = b.named("start_generate")
    assert (start["begin"], start["output"]) == (0, TOKENS[:1]) and "lease_id" not in start


async def test_after_the_old_engines_death_the_strategy_runs_again(pair):
    r, a, _ = pair
    a.send_gate = asyncio.Event()
    ask = asyncio.create_task(drained(r, a))
    await a.until(lambda: a.named("remote_send"))
    r.server.router.registry["a"].go_down("as if it were dead")
    receipt = await ask
    assert [retry["error"]["type"] for retry in receipt["retries"]][1] == "peer_unreachable"
    a.send_gate.set()


async def test_a_move_that_is_refused_costs_no_attempt(pair):
    r, a, b = pair
    b.refuse["prep_recv"] = [BadAddress("another cluster's")]
    r.server.router.execution.retries._share = 0.0
    receipt = await drained(r, a)
    assert [retry["error"]["type"] for retry in receipt["retries"]] == ["draining", "bad_address"]
    assert b.named("start_generate")[0]["output"] == TOKENS[:1]

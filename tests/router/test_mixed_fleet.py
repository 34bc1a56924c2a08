"""Engine processes with pages of two sizes, so in two KV groups, behind one router."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from engine_process import EngineProcess
from waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PROMPT = [(7 * i * i + 3 * i) % 500 + 1 for i in range(150)]
GROUP = {"a": 16, "b": 16, "c": 32, "d": 32}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineProcess]]:
    started = {
        name: EngineProcess(
            "--pool-pages", "512", "--page-size", str(size), "--engine-id", name, secret="8b" * 32
        )
        for name, size in GROUP.items()
    }
    yield started
    for engine in started.values():
        engine.kill()


async def ask(r: Any, number: int, tokens: int = 8) -> tuple[list[int], dict[str, Any]]:
    """Send a request; return its tokens and its receipt."""
    body = {
        "prompt": [number + 1, *PROMPT], "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    name = f"x{number}"
    status, answer = await r.post("/v1/completions", body, headers={"X-Request-Id": name})
    assert status == 200, answer
    return answer["choices"][0]["token_ids"], await r.receipt(name)


def engines_of(receipt: dict[str, Any], call: str) -> list[str]:
    return [leg["engine"] for leg in receipt["legs"] if leg["call"] == call]


async def test_kv_moves_within_groups_and_answers_are_those_of_one_engine(engines, routed_to):
    urls = [engine.url for engine in engines.values()]
    alone = []
    async with routed_to(urls[:1]) as r:
        alone = [(await ask(r, number))[0] for number in range(8)]
    async with routed_to(urls, strategy="prefill_decode") as r:
        await until(lambda: all(each.usable for each in r.server.router.registry))
        listed = (await r.get("/admin/engines"))["engines"]
        assert [each["page_size"] for each in listed] == [*GROUP.values()]
        assert len({each["kv"] for each in listed}) == 2
        decodes = set()
        for number in range(8):
            tokens, receipt = await ask(r, number)
            assert tokens == alone[number]
            assert receipt["fallbacks"] == [] and not receipt["retries"]
            (decode,) = engines_of(receipt, "start_generate")
            for sender in engines_of(receipt, "remote_send"):
                assert sender != decode and GROUP[sender] == GROUP[decode]
            decodes.add(GROUP[decode])
        assert decodes == {16, 32}
        await r.settled()
    for engine in engines.values():
        await asyncio.to_thread(engine.at_rest)


async def test_a_drained_generation_stays_in_its_group_and_a_context_too(engines, routed_to):
    urls = [engine.url for engine in engines.values()]
    async with routed_to(urls) as r:
        registry = r.server.router.registry
        await until(lambda: all(each.usable for each in registry))
        whole, _ = await ask(r, 20, 300)
        for number, busy in enumerate(("a", "c"), 30):

            def runs_on(name: str = busy) -> bool:
                return registry[name].load.streams > 0

            for other in registry:
                other.draining = other.id != busy
            running = asyncio.create_task(ask(r, 20, 300))
            await until(runs_on)
            for other in registry:
                other.draining = False
            assert registry.drain(registry[busy], True) == 1
            tokens, receipt = await running
            assert tokens == whole, number
            old, new = engines_of(receipt, "start_generate")
            assert old == busy != new and GROUP[old] == GROUP[new]
            registry.drain(registry[busy], False)
        prefix = [21, *PROMPT]
        for target, status in (("b", 200), ("c", 400)):
            body = {"prefix": prefix, "from": "a", "to": target}
            got, answer = await r.post("/admin/migrate", body)
            assert got == status, answer
        await r.settled()
    for engine in engines.values():
        await asyncio.to_thread(engine.at_rest)

"""Many clients connect at once and disconnect at any moment; nothing of them may remain."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest
from e2e_deployment import Deployment
from e2e_faults import until

REQUESTS = 200
EVERY = 3  # every third client disconnects


async def _one(client: httpx.AsyncClient, url: str, number: int) -> str:
    source = random.Random(number)
    prompt = [source.randrange(500) for _ in range(source.randrange(1, 600))]
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": source.randrange(1, 60),
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    vanish_after = source.random() * 1.5 if number % EVERY == 0 else None
    tokens = 0
    try:
        async with asyncio.timeout(vanish_after):
            async with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
                assert reply.status_code == 200, await reply.aread()
                async for line in reply.aiter_lines():
                    assert "error" not in line, line
                    if line.startswith("data: {"):
                        tokens += line.count('"token_ids"') and len(
                            httpx.Response(200, content=line[6:]).json()["choices"][0]["token_ids"]
                            or ()
                        )
    except TimeoutError:
        return "vanished"
    assert tokens == body["max_tokens"]
    return "finished"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "params"),
    [
        pytest.param("data_parallel", {}, marks=pytest.mark.thorough),
        pytest.param("prefill_decode", {}, marks=pytest.mark.thorough),
        ("balanced", {"ratio": 0.3}),
    ],
)
async def test_nothing_remains_after_a_third_of_200_clients_disconnects(
    tiny: Deployment, strategy: str, params: dict[str, float]
) -> None:
    tiny.use(strategy, **params)
    limits = httpx.Limits(max_connections=REQUESTS)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        outcomes = await asyncio.gather(*(_one(client, tiny.url, n) for n in range(REQUESTS)))
    assert outcomes.count("finished") >= REQUESTS - REQUESTS // EVERY - 1
    print(f"{strategy}: {outcomes.count('vanished')} of {REQUESTS} vanished in time")
    for engine in tiny.engines:
        engine.check_at_rest()

    def loads() -> set[tuple[int, int]]:
        return {(one["load"]["tokens"], one["load"]["streams"]) for one in tiny.members()}

    # The router may notice late that the last clients have gone.
    until(lambda: loads() == {(0, 0)}, "the end of the load")


@pytest.mark.slow
async def test_hot_swap_under_load_loses_no_token(tiny: Deployment) -> None:
    """Strategies change while streams run; each stream has the tokens of an idle engine."""
    names = ["data_parallel", "prefill_decode", "balanced"]
    source = random.Random(3)
    prompts = [[source.randrange(500) for _ in range(120)] for _ in range(24)]
    tiny.use("data_parallel")
    wanted = [tiny.complete(p, greedy=30, model="tiny")["choices"][0]["token_ids"] for p in prompts]

    async def one(client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 30,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        reply = await client.post(f"{tiny.url}/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["token_ids"]

    done = asyncio.Event()

    async def swap() -> int:
        swaps = 0
        while not done.is_set():
            await asyncio.to_thread(tiny.use, names[swaps % len(names)])
            swaps += 1
        return swaps

    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=64)) as client:
        swapping = asyncio.create_task(swap())
        try:
            got = await asyncio.gather(*(one(client, p) for p in prompts * 3))
        finally:
            done.set()
        assert await swapping > len(names)
    assert got == wanted * 3

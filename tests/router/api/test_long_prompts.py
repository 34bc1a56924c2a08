"""Prompts that fit no single pool, in front of real engines that borrow and one that lends."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineProcess
from waiting import until

from router.base import EngineId
from strategies.data_parallel import data_parallel
from strategies.prefill_decode import prefill_decode

pytestmark = [pytest.mark.slow, pytest.mark.processes]

LENT = 80  # pages: ten blocks
PAGE = (Path(__file__).parents[3] / "docs" / "strategies.md").read_text()
(LONG_BESIDE_SHORT,) = re.findall(
    r"```python\n((?:(?!```).)*def long_beside_short.*?)```", PAGE, re.S
)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[EngineProcess]]:
    """Pools of 64 and 96 pages that may borrow, and one that lends ten blocks."""
    borrows = "--borrow", "--max-model-len", "4096"
    made = [
        EngineProcess("--pool-pages", "64", *borrows, "--engine-id", "small"),
        EngineProcess("--pool-pages", "96", *borrows, "--engine-id", "large"),
        EngineProcess(
            *("--pool-pages", "200", "--lend-share", "0.4", "--max-model-len", "2048"),
            *("--engine-id", "lender"),
        ),
    ]
    yield made
    for engine in made:
        engine.kill()


def prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(3, 250) for _ in range(length)]


async def legs(router, tokens: list[int], max_tokens: int = 3) -> list[tuple[str, str]]:
    name = {"X-Request-Id": f"of-{len(tokens)}"}
    body = {"prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    status, reply = await router.post("/v1/completions", body, headers=name)
    assert status == 200, reply
    receipt = await router.receipt(name["X-Request-Id"])
    return [(leg["call"], leg["engine"]) for leg in receipt["legs"]]


async def test_a_prompt_goes_where_pool_and_loans_hold_it_and_fails_at_once_if_nowhere(
    engines, routed_to
):
    async with routed_to([engine.url for engine in engines], health_interval_s=0.2) as r:
        ledger = r.server.router.registry.ledger
        await until(lambda: len(ledger.describe()) == 3)
        # The engines that borrow are told of it a little later.
        await until(lambda: all(one.state()["borrowing"]["creditors"] for one in engines[:2]))
        r.use(data_parallel)
        # 96 pages and ten blocks: 2816 tokens; the small engine has room for 2304.
        for length in (2350, 2600):
            assert await legs(r, prompt(length)) == [("start_generate", "large")]
        status, body = await r.post(
            "/v1/completions", {"prompt": prompt(2900), "max_tokens": 3, "temperature": 0}
        )
        assert status == 503
        assert body["error"]["message"] == (
            "no engine has room for 2903 tokens; large holds 1536, and 2816 with all that others "
            "lend"
        )
        # Strategies need not know: no lease is so long, and nothing is sent.
        r.use(prefill_decode)
        collapsed = [("prep_recv", "large"), ("start_generate", "large")]
        assert await legs(r, prompt(2400)) == collapsed
        await until(lambda: ledger.available(EngineId("lender")) == LENT)  # all is given back
        found: dict[str, Any] = {}
        exec(LONG_BESIDE_SHORT, found)
        r.use(found["long_beside_short"], long=500)
        assert await legs(r, prompt(900)) == [("start_generate", "lender")]
    for engine in engines:
        engine.at_rest()


async def test_short_prompts_avoid_the_engine_of_a_long_one_while_it_runs(engines, routed_to):
    """Six at once: by their loads alone, the engine of the long one would get two of them."""
    found: dict[str, Any] = {}
    exec(LONG_BESIDE_SHORT, found)
    async with routed_to([engine.url for engine in engines], health_interval_s=0.2) as r:
        await until(lambda: len(r.server.router.registry.ledger.describe()) == 3)
        r.use(found["long_beside_short"], long=500)
        loads = {one.id: one.load for one in r.server.router.registry}
        long = asyncio.create_task(legs(r, prompt(901), max_tokens=400))
        await until(lambda: any(load.streams for load in loads.values()))
        (busy,) = [name for name, load in loads.items() if load.streams]
        short = await asyncio.gather(*(legs(r, prompt(40 + n), 10) for n in range(6)))
        assert not long.done()  # it ran all the while
        assert busy not in {engine for each in short for _, engine in each}
        assert await long == [("start_generate", busy)]
        after = await asyncio.gather(*(legs(r, prompt(50 + n), 10) for n in range(6)))
        assert busy in {engine for each in after for _, engine in each}
    for engine in engines:
        engine.at_rest()

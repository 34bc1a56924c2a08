"""A request has the same legs in its receipt on virtual engines as in a real deployment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from e2e_deployment import Deployment, deployed
from virtual_deployment import virtual_deployment
from virtual_time import in_virtual_time

from engine.latency import FixedLatency, Profile, PutLatency

NEW = 8
POOL_PAGES = 512
ROLES = ("prefill", "decode")
# `auto`, and `adaptive` with it, divides by measured times; the two deployments differ in these.
STRATEGIES: dict[str, dict[str, Any]] = {
    "balanced": {"ratio": 0.3},
    "cache_aware": {},
    "data_parallel": {},
    "migrate": {},
    "prefill_decode": {},
    "replicate": {"every": 4},
}
PROFILE = Profile(
    name="mock", model="mock", device="cpu", gpus=0, source="made up", layers=2,
    kv_bytes_per_token=16, context_length=8192, pool_tokens=16 * POOL_PAGES,
    step=FixedLatency(1.0), put=PutLatency(1e9, 1e-5),
)  # fmt: skip


def prompts(salt: int) -> list[list[int]]:
    """Return a prompt, the same again, one that extends it, and one that is shorter than a page."""
    first = [(salt * i * i + 17 * i) % 200 + 1 for i in range(100)]
    return [first, first, [*first, *range(1, 71)], [salt + 1] * 9]


@pytest.fixture(scope="module")
def mocks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    flags = ("--prefill", "1", "--decode", "1", "--pool-pages", str(POOL_PAGES), "--step-ms", "1")
    with deployed(tmp_path_factory.mktemp("mock"), "mock", *flags) as deployment:
        yield deployment


def legs_of(receipt: dict[str, Any], role_of: Callable[[str], str]) -> dict[str, Any]:
    """Return what of a receipt depends neither on time nor on the engines' names."""
    legs = [
        {
            "engine": role_of(leg["engine"]),
            **{
                name: leg[name]
                for name in (
                    "call", "begin", "end", "match_len", "sent_tokens", "cached_tokens",
                    "computed_tokens", "tokens", "collapsed", "attempt", "choice",
                )
            },
            "replica": leg["replica"] and role_of(leg["replica"]),
            "error": leg["error"] and leg["error"]["type"],
        }
        for leg in receipt["legs"]
    ]  # fmt: skip
    return {"legs": legs, **{name: receipt[name] for name in ("fallbacks", "retries")}}


def real_legs(deployment: Deployment, strategy: str, salt: int) -> list[dict[str, Any]]:
    roles = {member["id"]: member["role"] for member in deployment.members()}
    assert sorted(roles.values()) == sorted(ROLES)
    deployment.use(strategy, **STRATEGIES[strategy])
    receipts = []
    for prompt in prompts(salt):
        answer = deployment.complete(prompt, greedy=NEW, model="mock")
        receipts.append(legs_of(deployment.receipt(answer["request_id"]), roles.__getitem__))
    return receipts


def virtual_legs(strategy: str, salt: int) -> list[dict[str, Any]]:
    receipts = []

    @in_virtual_time
    async def run() -> None:
        engines = {role: (role, PROFILE) for role in ROLES}
        async with virtual_deployment(engines, strategy, **STRATEGIES[strategy]) as deployment:
            for prompt in prompts(salt):
                _, receipt = await deployment.complete(prompt, NEW)
                await asyncio.sleep(1)
                receipts.append(legs_of(receipt.describe(), str))
            await deployment.check_at_rest()

    run()
    return receipts


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_receipt_has_the_same_legs_in_simulation(mocks: Deployment, strategy: str):
    salt = 3 + list(STRATEGIES).index(strategy)
    simulated, real = virtual_legs(strategy, salt), real_legs(mocks, strategy, salt)
    assert len(simulated) == len(real) == len(prompts(salt))
    for number, (one, other) in enumerate(zip(simulated, real, strict=True)):
        assert one == other, number

"""A request has the same legs in its receipt on virtual engines as in a real deployment."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from e2e_deployment import Deployment
from e2e_forked import forked
from virtual_deployment import virtual_deployment
from virtual_time import in_virtual_time

from engine.latency import FixedLatency, Profile, PutLatency

NEW = 8
POOL_PAGES = 512
LONG = 400  # tokens of a prompt that `auto` divides
ROLES = ("prefill", "decode")
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


def prompts(salt: int, tokens: int = 100) -> list[list[int]]:
    """Return a prompt, the same again, one that extends it, and one that is shorter than a page."""
    first = [(salt * i * i + 17 * i) % 200 + 1 for i in range(tokens)]
    return [first, first, [*first, *range(1, 71)], [salt + 1] * 9]


@pytest.fixture(scope="module")
def mocks() -> Iterator[Deployment]:
    flags = ("--pool-pages", str(POOL_PAGES), "--step-ms", "1")
    with forked("mock", *flags, roles=ROLES) as deployment:
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


def in_order() -> Callable[[str], str]:
    """Return names for engines: 0 for the first that is asked for, 1 for the second.

    Ties take turns, and what ran before on a deployment decides whose turn it is.
    """
    names: dict[str, str] = {}
    return lambda engine: names.setdefault(engine, str(len(names)))


Names = Callable[[], Callable[[str], str]]  # of a receipt's engines


def real_legs(
    deployment: Deployment, strategy: str, params: dict[str, Any], asked: list[list[int]],
    *, names: Names = in_order, anew: bool = False, model: str = "tiny",
) -> list[dict[str, Any]]:  # fmt: skip
    """Run requests one by one; `anew`: each as the first one of a revision."""
    receipts = []
    deployment.use(strategy, **params)
    for prompt in asked:
        if anew:
            deployment.use(strategy, **params)
        answer = deployment.complete(prompt, greedy=NEW, model=model)
        receipts.append(legs_of(deployment.receipt(answer["request_id"]), names()))
    return receipts


def virtual_legs(
    roles: tuple[str, ...], strategy: str, params: dict[str, Any], asked: list[list[int]],
    *, names: Names = in_order, anew: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Run requests one by one; `anew`: each as the first one of a revision."""
    receipts = []

    @in_virtual_time
    async def run() -> None:
        engines = {role: (role, PROFILE) for role in roles}
        async with virtual_deployment(engines, strategy, **params) as deployment:
            for prompt in asked:
                if anew:
                    deployment.use(strategy, **params)
                _, receipt = await deployment.complete(prompt, NEW)
                await asyncio.sleep(1)
                receipts.append(legs_of(receipt.describe(), names()))
            await deployment.check_at_rest()

    run()
    return receipts


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_receipt_has_the_same_legs_in_simulation(mocks: Deployment, strategy: str):
    salt = 3 + list(STRATEGIES).index(strategy)
    params, asked = STRATEGIES[strategy], prompts(salt)
    roles = {member["id"]: member["role"] for member in mocks.members()}
    assert sorted(roles.values()) == sorted(ROLES)
    simulated = virtual_legs(ROLES, strategy, params, asked, names=lambda: str)
    real = real_legs(mocks, strategy, params, asked, names=lambda: roles.__getitem__, model="mock")
    assert len(simulated) == len(real) == len(asked)
    for number, (one, other) in enumerate(zip(simulated, real, strict=True)):
        assert one == other, number


# The cases below run on engines with the model `tiny`.

COLLAPSE = ("adaptive", "balanced", "prefill_decode")  # they prepare to receive
ALONE = {**STRATEGIES, "balanced": {"ratio": "auto"}, "adaptive": {}}
# `auto` divides by measured times, in which the two deployments differ, but not for the first
# request of a revision. With a window of one request, `adaptive` delegates to `balanced` for a
# prompt that is not cached, and to `cache_aware` for one that is.
AT_FIRST: dict[str, dict[str, Any]] = {"balanced": {"ratio": "auto"}, "adaptive": {"window": 1}}


@pytest.fixture(scope="module")
def pair() -> Iterator[Deployment]:
    with forked("tiny", "--pool-pages", str(POOL_PAGES), roles=ROLES) as deployment:
        yield deployment


@contextmanager
def without_prefill(deployment: Deployment) -> Iterator[None]:
    """Leave the decode engine alone."""
    (engine,) = (each["id"] for each in deployment.members() if each["role"] == "prefill")

    def drain(draining: bool) -> None:
        url = f"{deployment.url}/admin/engines/{engine}"
        body = {"draining": draining}
        httpx.patch(url, json=body, headers=deployment.admin, timeout=30).raise_for_status()

    drain(True)
    try:
        yield
    finally:
        drain(False)


@pytest.mark.parametrize("strategy", AT_FIRST)
def test_requests_that_are_divided_by_measurements_have_the_same_legs(
    pair: Deployment, strategy: str
):
    params, asked = AT_FIRST[strategy], prompts(23 + list(AT_FIRST).index(strategy), LONG)
    anew = strategy == "balanced"
    simulated = virtual_legs(ROLES, strategy, params, asked[:3], anew=anew)
    real = real_legs(pair, strategy, params, asked[:3], anew=anew)
    for number, (one, other) in enumerate(zip(simulated, real, strict=True)):
        assert one == other, number
    divided = [leg["call"] for leg in real[0]["legs"]]
    assert divided == ["prep_recv", "remote_send", "start_generate"]
    computed = real[0]["legs"][1]["computed_tokens"]
    assert 0 < computed < len(asked[0]) - 16  # the decode engine has its share


@pytest.mark.parametrize("strategy", ALONE)
def test_a_lone_engine_has_the_same_collapsed_legs(pair: Deployment, strategy: str):
    params, asked = ALONE[strategy], prompts(53 + list(ALONE).index(strategy), LONG)
    simulated = virtual_legs(("decode",), strategy, params, asked)
    with without_prefill(pair):
        real = real_legs(pair, strategy, params, asked)
    for number, (one, other) in enumerate(zip(simulated, real, strict=True)):
        assert one == other, number
    legs = [leg for receipt in real for leg in receipt["legs"]]
    assert {leg["engine"] for leg in legs} == {"0"}
    assert any(leg["collapsed"] for leg in legs) == (strategy in COLLAPSE)


def test_a_prefix_moves_off_an_engine_with_a_stream_by_the_same_legs(pair: Deployment):
    """`migrate` copies what a running request has cached, and generates on the other engine."""
    first, _, longer, _ = prompts(83, LONG)
    params, receipts = {"overload": 0}, list[dict[str, Any]]()

    @in_virtual_time
    async def simulate() -> None:
        engines = {role: (role, PROFILE) for role in ROLES}
        async with virtual_deployment(engines, "migrate", **params) as deployment:
            _, before = await deployment.complete(first, NEW)
            await asyncio.sleep(1)
            stream = asyncio.create_task(deployment.complete(first, 3000))
            await asyncio.sleep(0.5)  # some hundred steps
            _, moved = await deployment.complete(longer, NEW)
            stream.cancel()
            await asyncio.wait([stream])
            await deployment.check_at_rest()
            name = in_order()
            receipts.extend(legs_of(each.describe(), name) for each in (before, moved))

    simulate()
    pair.use("migrate", **params)
    before = pair.complete(first, greedy=NEW, model="tiny")
    body = {
        "model": "tiny", "prompt": first, "max_tokens": 3000, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    with httpx.stream("POST", f"{pair.url}/v1/completions", json=body, timeout=120) as stream:
        lines = (line for line in stream.iter_lines() if line)
        assert "error" not in json.loads(next(lines).removeprefix("data: "))
        time.sleep(0.5)  # as above: by then the feed has told the router what is cached
        moved = pair.complete(longer, greedy=NEW, model="tiny")
    name = in_order()
    real = [legs_of(pair.receipt(answer["request_id"]), name) for answer in (before, moved)]
    assert receipts == real
    calls = [(leg["call"], leg["engine"]) for leg in real[1]["legs"]]
    assert calls == [
        ("prep_recv", "1"), ("remote_send", "0"), ("commit", "1"), ("start_generate", "1"),
    ]  # fmt: skip

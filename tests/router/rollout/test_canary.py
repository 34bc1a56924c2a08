"""Canaries: their share of the requests, their verdict, and their promotion or rollback."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace

import pytest

from router import Chunk, strategy
from router.rollout.canary import Canary, CanaryRules

ASK = {"prompt": [1, 2, 3], "max_tokens": 3, "temperature": 0}


@pytest.mark.parametrize("percent", [1, 5, 33.3, 50, 100])
def test_the_share_is_exact(percent):
    canary = Canary(CanaryRules(percent=percent))
    assert abs(sum(canary.takes_next() for _ in range(1000)) - 10 * percent) <= 1


def judge(rules: CanaryRules, outcomes):
    """Return the verdict and the number of requests before it."""
    canary = Canary(rules)
    for number, outcome in enumerate(outcomes, 1):
        failed = outcome == "failed"
        ttft = None if failed else float(outcome)
        if (verdict := canary.note(failed=failed, ttft_ms=ttft)) is not None:
            return verdict.decision, number
    return None


RULES = CanaryRules(max_error_rate=0.05, max_ttft_p99_ms=100, min_requests=100)


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ([50] * 100, ("promoted", 100)),
        ([50] * 99, None),
        (["failed"] * 5 + [50] * 95, ("promoted", 100)),
        # Six failures decide at once: later successes cannot change the verdict.
        (["failed"] * 6 + [50] * 94, ("rolled_back", 6)),
        ([101] + [50] * 99, ("promoted", 100)),
        ([50] * 98 + [101] * 2, ("rolled_back", 100)),
        ([100] * 100, ("promoted", 100)),
    ],
)
def test_the_verdict_comes_as_soon_as_it_is_certain(outcomes, verdict):
    assert judge(RULES, outcomes) == verdict


def test_the_verdict_follows_the_nearest_rank_p99():
    """Compare with the definition for every number of slow requests."""
    for count in (1, 10, 99, 100, 101, 250):
        rules = CanaryRules(max_error_rate=0, max_ttft_p99_ms=100, min_requests=count)
        for slow in range(min(count, 6)):
            times = sorted([50.0] * (count - slow) + [101.0] * slow)
            p99 = times[-(-99 * count // 100) - 1]
            decision, _ = judge(rules, times)
            assert (decision == "promoted") == (p99 <= 100), (count, slow)


@pytest.mark.parametrize(
    ("percent", "pattern"),
    [(50, "-x-x-x-x"), (25, "---x---x"), (30, "---x--x--x---x"), (100, "xxx"), (99, "-xxx")],
)
def test_the_share_is_spread_evenly(percent: float, pattern: str):
    canary = Canary(CanaryRules(percent=percent))
    assert "".join("-x"[canary.takes_next()] for _ in pattern) == pattern


def test_a_canary_gets_one_request_in_twenty_and_a_hundred_in_all_unless_told_otherwise():
    assert Canary(CanaryRules()).describe() == {
        "percent": 5.0, "max_error_rate": 0.01, "max_ttft_p99_ms": None, "min_requests": 100,
        "ended": 0, "failed": 0, "slow": 0,
    }  # fmt: skip


def test_a_budget_is_counted_exactly():
    """`0.29 * 100` is less than 29 in floating point."""
    for requests in (10, 100):
        for percent in range(100):
            rules = CanaryRules(max_error_rate=percent / 100, min_requests=requests)
            budget = percent * requests // 100
            failures = ["failed"] * budget
            assert judge(rules, [*failures, "failed"]) == ("rolled_back", budget + 1)
            assert judge(rules, failures) is None


def test_the_reason_of_a_verdict_has_its_figures():
    def reason(rules: CanaryRules, *times: float) -> str:
        """Return the reason after a failure and a request for each of these times."""
        canary = Canary(rules)
        verdict = canary.note(failed=True, ttft_ms=None)
        for ttft in times:
            verdict = verdict or canary.note(failed=False, ttft_ms=ttft)
        assert verdict is not None
        return verdict.why

    rules = CanaryRules(max_error_rate=0.5, min_requests=2)
    assert reason(rules, 5000.0) == "1 of 2 requests failed"
    limited = replace(rules, max_ttft_p99_ms=100)
    assert reason(limited, 5.0) == "1 of 2 requests failed, 0 took over 100 ms to a token"
    assert reason(limited, 101.0) == (
        "1 of 2 requests took over 100 ms to their first token; of 2 at most 0 may (p99)"
    )
    assert reason(replace(rules, max_error_rate=0.4)) == (
        "1 of 1 requests failed; of 2 at most 0 may"
    )


@pytest.mark.parametrize(
    ("failed", "ttft_ms", "limit", "slow"),
    [
        (False, 100.1, 100.0, 1),
        (False, 100.0, 100.0, 0),
        (False, None, 100.0, 0),
        (False, 100.1, None, 0),
        (True, 100.1, 100.0, 0),
    ],
)
def test_a_request_is_slow_if_it_succeeded_beyond_the_limit(
    failed: bool, ttft_ms: float | None, limit: float | None, slow: int
):
    rules = CanaryRules(max_error_rate=1.0, max_ttft_p99_ms=limit, min_requests=1000)
    canary = Canary(rules)
    assert canary.note(failed=failed, ttft_ms=ttft_ms) is None
    assert (canary.ended, canary.failed, canary.slow) == (1, int(failed), slow)
    assert canary.describe() == {**asdict(rules), "ended": 1, "failed": int(failed), "slow": slow}


@strategy
async def good(request, cluster):
    async for chunk in cluster.engines.round_robin().start_generate(request):
        yield chunk


@strategy
async def bad(request, cluster):
    raise KeyError("bad")
    yield Chunk()


async def put(r, name, **fields):
    body = {"name": name, **fields}
    async with r.http.put(r.server.url + "/admin/strategy", json=body) as response:
        return response.status, await response.json()


def known(r, *strategies):
    for one in strategies:
        r.server.router.catalog._loaded[one.name] = one


@pytest.mark.slow
async def test_a_good_canary_is_promoted_under_its_own_number(route, fake):
    async with route(fake("a")) as r:
        known(r, good)
        rules = {"percent": 50, "min_requests": 5, "max_ttft_p99_ms": 60_000}
        status, reply = await put(r, "good", canary=rules)
        assert (status, reply["generation"], reply["canary"]) == (200, 2, True)
        served = []
        for number in range(10):
            state = await r.get("/admin/strategies")
            assert state["active"]["generation"] == 1
            assert state["canary"]["generation"] == 2
            id = f"r{number}"
            assert (await r.post("/v1/completions", ASK, headers={"X-Request-Id": id}))[0] == 200
            served.append((await r.receipt(id))["generation"])
        assert served == [1, 2] * 5
        state = await r.get("/admin/strategies")
        assert (state["active"]["generation"], state["canary"]) == (2, None)
        assert state["last_canary"]["decision"] == "promoted"
        assert state["last_canary"]["why"].startswith("0 of 5 requests failed")
        status, reply = await r.post("/admin/rollback", {})
        assert (reply["generation"], reply["name"]) == (3, "data_parallel")
        entries = (await r.get("/admin/audit"))["entries"]
        assert [(e["who"], e["what"], e["generation"]) for e in entries] == [
            ("router", "started", 1), ("127.0.0.1", "canary", 2), ("router", "promote", 2),
            ("127.0.0.1", "rollback", 3),
        ]  # fmt: skip


async def test_it_is_told_whether_there_is_something_to_roll_back(route, fake):
    async with route(fake("a")) as r:
        known(r, good)

        async def told() -> bool:
            return (await r.get("/admin/strategies"))["can_roll_back"]

        assert not await told()
        for changes in ({"canary": {"percent": 50}}, {}):
            await put(r, "good", **changes)
            assert await told()
            assert (await r.post("/admin/rollback", {}))[0] == 200
            assert not await told()
        assert (await r.post("/admin/rollback", {}))[0] == 409


async def test_a_canary_is_promoted_by_hand(route, fake):
    async with route(fake("a")) as r:
        known(r, good)
        status, reply = await r.post("/admin/promote", {"generation": 2})
        assert (status, reply["error"]["param"]) == (409, "generation")
        await put(r, "good", canary={"percent": 50})
        for wrong in ({"generation": 1}, {"generation": 3}):
            assert (await r.post("/admin/promote", wrong))[0] == 409
        for wrong in ({}, {"generation": "2"}):
            assert (await r.post("/admin/promote", wrong))[0] == 400
        status, reply = await r.post("/admin/promote", {"generation": 2})
        assert (status, reply["generation"], reply["canary"]) == (200, 2, False)
        state = await r.get("/admin/strategies")
        assert (state["active"]["generation"], state["canary"]) == (2, None)
        assert state["last_canary"]["decision"] == "promoted"
        entry = (await r.get("/admin/audit"))["entries"][-1]
        assert (entry["who"], entry["what"], entry["generation"]) == ("127.0.0.1", "promote", 2)
        assert (await r.post("/admin/rollback", {}))[1]["name"] == "data_parallel"


async def test_a_failing_canary_is_rolled_back_with_a_reason(route, fake):
    async with route(fake("a")) as r:
        known(r, bad)
        await put(r, "bad", canary={"percent": 50, "max_error_rate": 0.1, "min_requests": 20})
        statuses = [(await r.post("/v1/completions", ASK))[0] for _ in range(10)]
        assert statuses == [200, 500, 200, 500, 200, 500] + [200] * 4
        state = await r.get("/admin/strategies")
        assert (state["active"]["generation"], state["canary"]) == (1, None)
        assert state["last_canary"]["decision"] == "rolled_back"
        assert "3 of 3 requests failed; of 20 at most 2 may" in state["last_canary"]["why"]
        assert (await r.get("/admin/audit"))["entries"][-1]["what"] == "canary_rolled_back"


async def test_a_slow_canary_is_rolled_back_even_if_its_clients_leave(route, fake):
    gate = asyncio.Event()

    @strategy
    async def slow(request, cluster):
        await gate.wait()
        yield Chunk()

    async with route(fake("a")) as r:
        known(r, slow)
        rules = {"percent": 100, "max_ttft_p99_ms": 20, "min_requests": 50}
        await put(r, "slow", canary=rules)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await r.post("/v1/completions", ASK)
        async with asyncio.timeout(10):
            while r.server.router.revisions.candidate is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert (await r.post("/v1/completions", ASK))[0] == 200
        why = (await r.get("/admin/strategies"))["last_canary"]["why"]
        assert "took over 20 ms to their first token" in why


async def test_client_errors_do_not_count_against_a_canary(route, fake):
    a = fake("a")
    async with route(a) as r:
        known(r, good)
        await put(r, "good", canary={"percent": 100, "max_error_rate": 0, "min_requests": 2})
        assert (await r.post("/v1/completions", {**ASK, "max_tokens": -1}))[0] == 400
        assert (await r.get("/admin/strategies"))["canary"]["ended"] == 0
        for _ in range(2):
            await r.post("/v1/completions", ASK)
        assert (await r.get("/admin/strategies"))["active"]["name"] == "good"


async def test_there_is_one_canary_until_a_rollback_or_an_activation(route, fake):
    async with route(fake("a")) as r:
        known(r, good, bad)
        assert (await put(r, "good", canary={}, if_generation=7))[0] == 409
        assert (await put(r, "good", canary={}))[0] == 200
        assert (await put(r, "bad", canary={}))[0] == 409
        for wrong in ({"percent": 0}, {"percent": 101}, {"min_requests": 0}, {"x": 1}):
            status, body = await put(r, "good", canary=wrong)
            assert (status, body["error"]["param"]) == (400, f"canary.{next(iter(wrong))}")
        status, body = await r.post("/admin/rollback", {})
        assert (body["generation"], body["name"]) == (1, "data_parallel")  # unchanged
        assert (await put(r, "good", canary={}))[1]["generation"] == 3
        assert (await put(r, "balanced", if_generation=1))[1]["generation"] == 4
        state = await r.get("/admin/strategies")
        assert state["canary"] is None
        assert "activates another generation" in state["last_canary"]["why"]

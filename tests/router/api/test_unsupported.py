"""What clients and operators are told of engines that do not support every call."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from forked import ForkedProcess, run_microserve
from waiting import until

from engine.protocol import ALL_CAPABILITIES, ModelInfo, Unsupported
from router import strategy
from router.base import root_cause
from router.base.errors import StartFailed

PROMPT = list(range(1, 41))
ASK = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "return_token_ids": True}
TOKENS = [140, 141, 142, 143, 144]
X = {"X-Request-Id": "x"}


def like(info: ModelInfo, *lacking: str, **changes: Any) -> ModelInfo:
    can = [each for each in ALL_CAPABILITIES if each not in lacking]
    return info.model_copy(update={"capabilities": can, **changes})


@pytest.fixture
def lacking(fake: Any) -> Any:
    """Make a scripted engine that lacks calls."""

    def make(name: str, *calls: str, **changes: Any) -> Any:
        engine = fake(name)
        engine.info = like(engine.info, *calls, **changes)
        return engine

    return make


@strategy
async def pins(request: Any, cluster: Any):
    """Pin first."""
    engine = cluster.engines.least_loaded()
    await engine.pin(request)
    async for chunk in engine.start_generate(request):
        yield chunk


async def command(r: Any, *arguments: str) -> tuple[int, str]:
    """Run `microserve strategy …` for a router; return its exit code and all its output."""

    def run() -> tuple[int, str]:
        process = ForkedProcess(run_microserve, "strategy", "--url", r.server.url, *arguments)
        try:
            code, said = process.wait(60), ""
            while True:
                try:
                    said += process.line() + "\n"
                except StartFailed:
                    return code, said + process.log
        finally:
            process.kill()

    return await asyncio.to_thread(run)


async def put(r: Any, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with r.http.put(f"{r.server.url}/admin/strategy", json=body) as reply:
        return reply.status, await reply.json()


async def test_engines_are_listed_with_what_they_support(route, lacking):
    a, b = lacking("a", "mirror", "pin"), lacking("b", page_size=32, fingerprint="g")
    async with route(a, b) as r:
        one, other = (await r.get("/admin/engines"))["engines"]
        assert set(ALL_CAPABILITIES) - set(one["capabilities"]) == {"mirror", "pin"}
        assert other["capabilities"] == list(ALL_CAPABILITIES)
        assert [(each["page_size"], each["kv"]) for each in (one, other)] == [(16, "f"), (32, "g")]
        assert [each["status"] for each in (one, other)] == ["up", "up"]
        status, body = await r.post("/v1/completions", ASK)
        assert (status, body["system_fingerprint"]) == (200, None)  # answers depend on the engine
        wanted = {"prefix": PROMPT, "from": "a", "to": "b"}
        status, body = await r.post("/admin/migrate", wanted)
        assert status == 400 and "a and b have different KV" in body["error"]["message"]
        status, body = await r.post("/admin/pin", {"prefix": PROMPT, "engine": "a"})
        assert (status, body["error"]["type"]) == (501, "unsupported")


async def test_a_client_is_told_which_engine_lacks_which_call(route, lacking):
    async with route(lacking("a", "pin"), lacking("b", "pin")) as r:
        r.use(pins)
        status, body = await r.post("/v1/completions", ASK, headers=X)
        error = body["error"]
        assert (status, error["type"], error["code"]) == (501, "unsupported", "pin")
        assert error["message"] in [f"engine {name} does not support pin" for name in "ab"]
        receipt = await r.receipt("x")
        assert receipt["fallbacks"][0] == "unsupported" and not receipt["legs"]
        await r.settled()


async def test_what_an_engine_says_it_does_not_support_is_asked_of_another(route, fake):
    a, b = fake("a"), fake("b")
    for engine in (a, b):
        engine.refuse["start_generate"] = [Unsupported("no logit_bias with this model")]
    async with route(a, b) as r:
        status, _ = await r.post("/v1/completions", ASK, headers=X)
        assert status == 200
        receipt = await r.receipt("x")
        first, second = receipt["retries"]
        assert first["error"] == {
            "type": "unsupported", "message": "no logit_bias with this model",
        }  # fmt: skip
        assert first["engines"] != second["engines"]  # the other one was asked next
        assert {leg["engine"] for leg in receipt["legs"]} == {"a", "b"}
        assert {each.breaker.state for each in r.server.router.registry} == {"closed"}


@pytest.mark.slow
@pytest.mark.processes
async def test_a_strategy_that_the_engines_lack_calls_for_is_not_made_active(route, lacking):
    engines = [lacking(name, "prep_recv", "mirror", "prefixes") for name in ("a", "b", "c", "d")]
    async with route(*engines) as r:
        says = "strategy prefill_decode calls prep_recv, which engines a, b, c, d do not support"
        canary = {"percent": 10, "min_requests": 5}
        for more in ({}, {"canary": canary}, {"if_generation": 1}):
            status, body = await put(r, {"name": "prefill_decode", **more})
            assert (status, body["error"]["message"]) == (501, says)
            assert body["error"]["type"] == "unsupported"
        listed = await r.get("/admin/strategies")
        assert listed["active"]["name"] == "data_parallel" and listed["canary"] is None
        status, body = await put(r, {"name": "prefill_decode", "if_generation": 7})
        assert status == 409
        status, body = await put(r, {"name": "cache_aware", "params": {"load_weight": 1.0}})
        assert (status, body["fallbacks"]) == (200, ["prefixes_unknown"])
        assert body["params"] == {"load_weight": 1.0}
        status, body = await put(r, {"name": "replicate"})
        assert (status, body["fallbacks"]) == (200, ["unmirrored"])
        status, body = await put(r, {"name": "data_parallel", "canary": canary})
        assert status == 200 and "fallbacks" not in body


@pytest.mark.slow
@pytest.mark.processes
async def test_a_router_does_not_start_with_a_strategy_that_its_engines_lack_calls_for(
    route, lacking, fake
):
    engines = [lacking(name, "prep_recv") for name in ("a", "b", "c", "d")]
    with pytest.raises((Unsupported, BaseExceptionGroup)) as refused:
        async with route(*engines, strategy="prefill_decode"):
            pass
    error = root_cause(refused.value)
    assert isinstance(error, Unsupported) and "calls prep_recv" in error.message
    absent = fake("e")
    absent.silent = True  # it may support all calls
    engines = [lacking(name, "prep_recv") for name in ("a", "b", "c", "d")]
    async with route(*engines, absent, strategy="prefill_decode", health_timeout_s=0.2) as r:
        active = (await r.get("/admin/strategies"))["active"]
        assert active["name"] == "prefill_decode"


@pytest.mark.slow
@pytest.mark.processes
async def test_a_file_is_checked_against_the_engines_of_a_router(route, lacking, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from router import strategy\n\n@strategy\nasync def mine(request, cluster):\n"
        "    engine = cluster.engines.least_loaded()\n    await engine.pin(request)\n"
        "    async for chunk in engine.start_generate(request):\n        yield chunk\n"
    )

    async def check(r: Any, *flags: str) -> tuple[int, str]:
        await until(lambda: all(each.usable for each in r.server.router.registry))
        return await command(r, "check", str(file), "--dry-run", *flags)

    async with route(lacking("a", "pin"), lacking("b", "pin")) as r:
        code, said = await check(r, "--fleet")
        assert (code, "calls pin, which engines a, b do not support" in said) == (2, True), said
        code, said = await check(r)
        assert code == 0 and "dry run ok" in said, said
    async with route(lacking("a", "pin"), lacking("b")) as r:
        code, said = await check(r, "--fleet")
        assert code == 0 and "with fallbacks: unsupported" in said, said


@pytest.mark.slow
@pytest.mark.processes
async def test_the_command_says_what_a_strategy_falls_back_to(route, lacking):
    async with route(lacking("a", "prefixes"), lacking("b")) as r:
        await until(lambda: all(each.usable for each in r.server.router.registry))
        code, said = await command(r, "use", "cache_aware")
        assert code == 0 and "cache_aware load_weight=0.5, with fallbacks: prefixes_unknown" in said

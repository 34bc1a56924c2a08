"""Engines that do not support every call, and engines with other KV, in virtual time.

No call reaches an engine that does not support it: the virtual engines would refuse it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from virtual_deployment import VirtualDeployment, virtual_deployment
from virtual_time import in_virtual_time

from engine.latency import FixedLatency, Profile, PutLatency
from engine.protocol import ALL_CAPABILITIES, BadRequest, Sampling, Unsupported
from engine.virtual import EngineKind, output_tokens
from router import strategy
from router.admission import RetryBudget
from router.base import Chunk, Request
from router.execution import ChoiceRunner, ChoiceWriter, migrate_prefix
from router.legs import Choices
from router.simulation.fleet import VirtualCalls
from router.telemetry import Receipt

PAGE = 16
PROFILE = Profile(
    name="test", model="test", device="none", gpus=0, source="made up", layers=2,
    kv_bytes_per_token=100, context_length=4096, pool_tokens=1 << 14,
    step=FixedLatency(step_ms=1.0, prompt_tokens_per_ms=1.0),
    put=PutLatency(bandwidth=1e9),
)  # fmt: skip
PROMPT = [(7 * i * i + 3 * i) % 900 + 1 for i in range(100)]


def without(*lacking: str, kv: str = "") -> EngineKind:
    return EngineKind(tuple(each for each in ALL_CAPABILITIES if each not in lacking), kv)


def deployed(kinds: dict[str, EngineKind], chosen: Any, **more: Any) -> Any:
    """A deployment of engines `name` or `name:role`."""
    engines = {}
    for each in kinds:
        name, _, role = each.partition(":")
        engines[name] = (role or "any", PROFILE)
    named = {each.partition(":")[0]: kind for each, kind in kinds.items()}
    return virtual_deployment(engines, chosen, kinds=named, **more)


@pytest.fixture(autouse=True)
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What engines had to refuse: nothing may be."""
    told: list[str] = []
    check = VirtualCalls._check

    def noted(self: VirtualCalls, *capabilities: Any) -> None:
        try:
            check(self, *capabilities)
        except Unsupported as error:
            told.append(error.message)
            raise

    monkeypatch.setattr(VirtualCalls, "_check", noted)
    yield told
    assert told == []


def engines_of(receipt: Receipt, call: str) -> list[str]:
    return [leg.engine for leg in receipt.legs if leg.call == call]


@strategy
async def pins(request: Request, cluster: Any):
    """Generate where the prompt can be pinned first."""
    engine = cluster.engines.least_loaded()
    await engine.pin(request)
    async for chunk in engine.start_generate(request):
        yield chunk


@strategy
async def reserves(request: Request, cluster: Any):
    engine = cluster.engines.least_loaded()
    async with engine.prep_recv(request, end=PAGE, reserve=3) as kv:
        async for chunk in engine.start_generate(request, begin=0, kv=kv):
            yield chunk


@in_virtual_time
async def test_an_engine_that_lacks_a_call_is_avoided_by_the_request():
    async with deployed({"a": without("pin"), "b": without()}, pins) as router:
        router.execution = replace(router.execution, retries=RetryBudget(0.0))  # it is free
        used = set()
        for _ in range(4):
            tokens, receipt = await router.complete(PROMPT, 3)
            assert tokens == output_tokens(PROMPT, 3)
            used |= {leg.engine for leg in receipt.legs}
            for retry in receipt.retries:
                assert retry["error"] == {
                    "type": "unsupported", "message": "engine a does not support pin",
                }  # fmt: skip
                assert retry["engines"] == ["a"]
            assert receipt.fallbacks == (["unsupported", "collapsed"] if receipt.retries else [])
        assert used == {"b"}
        breakers = [backend.breaker.state for backend in router.execution.runtime.registry]
        assert breakers == ["closed", "closed"]
        await router.check_at_rest()


@pytest.mark.parametrize(("chosen", "lacks"), [(pins, "pin"), (reserves, "mirror")])
@in_virtual_time
async def test_a_call_that_no_engine_supports_fails_the_request(chosen, lacks):
    async with deployed(dict.fromkeys("abcde", without(lacks)), chosen) as router:
        with pytest.raises(Unsupported, match=f"engine . does not support {lacks}") as error:
            await router.complete(PROMPT, 3)
        assert error.value.code == lacks and error.value.status == 501
        await router.check_at_rest()


@in_virtual_time
async def test_a_strategy_can_ask_and_choose():
    seen: dict[str, Any] = {}

    @strategy
    async def asks(request: Request, cluster: Any):
        seen.update({engine.id: engine.can("pin") for engine in cluster.engines})
        with pytest.raises(ValueError, match="no capability 'pins'"):
            cluster.engines.least_loaded().can("pins")
        engine = cluster.engines.able("pin", "commit").least_loaded()
        assert await engine.pin(request) >= 0
        async for chunk in engine.start_generate(request):
            yield chunk

    kinds = {"a": without("pin"), "b": without("commit"), "c": without()}
    async with deployed(kinds, asks) as router:
        for _ in range(3):
            _, receipt = await router.complete(PROMPT, 3)
            assert engines_of(receipt, "start_generate") == ["c"] and not receipt.retries
    assert seen == {"a": False, "b": True, "c": True}


# Pairs of engines


MIXED = {
    "a": without(), "b": without(kv="other"), "c": without(), "d": without(kv="other"),
}  # fmt: skip
GROUP = {"a": "first", "c": "first", "b": "other", "d": "other"}


@pytest.mark.parametrize("chosen", ["prefill_decode", "balanced"])
@pytest.mark.parametrize("page_sizes", [{}, {"b": 32, "d": 32}])
@in_virtual_time
async def test_engines_of_one_group_are_paired(chosen, page_sizes):
    used = set()
    async with deployed(MIXED, chosen, page_sizes=page_sizes) as router:
        for number in range(8):
            prompt = [*PROMPT, number]
            tokens, receipt = await router.complete(prompt, 3)
            assert tokens == output_tokens(prompt, 3)
            (sender,), (decode,) = (
                engines_of(receipt, call) for call in ("remote_send", "start_generate")
            )
            assert sender != decode and GROUP[sender] == GROUP[decode]
            assert receipt.fallbacks == [] and not any(leg.collapsed for leg in receipt.legs)
            used.add(decode)
        await router.check_at_rest()
    assert len(used) > 2


@in_virtual_time
async def test_an_engine_alone_in_its_group_computes_by_itself():
    kinds = {"a:prefill": without(), "b:decode": without(kv="other")}
    async with deployed(kinds, "prefill_decode") as router:
        tokens, receipt = await router.complete(PROMPT, 3)
        assert tokens == output_tokens(PROMPT, 3)
        assert engines_of(receipt, "start_generate") == ["b"]
        assert receipt.fallbacks == ["not_sent"] and not receipt.retries
        await router.check_at_rest()


@in_virtual_time
async def test_a_strategy_that_sends_across_groups_computes_again_and_says_so():
    @strategy
    async def across(request: Request, cluster: Any):
        sender, receiver = cluster.engines
        assert not sender.exchanges_kv_with(receiver) and sender.exchanges_kv_with(sender)
        end = len(request.tokens) - 1
        async with receiver.prep_recv(request, end=end) as kv:
            sent = await sender.remote_send(request, kv, begin=kv.match_len, end=end)
            assert sent.sent_tokens == 0 and kv.collapsed
            async for chunk in receiver.start_generate(request, begin=end, kv=kv):
                yield chunk

    async with deployed({"a": without(), "b": without(kv="other")}, across) as router:
        tokens, receipt = await router.complete(PROMPT, 3)
        assert tokens == output_tokens(PROMPT, 3) and receipt.fallbacks == ["not_sent"]
        await router.check_at_rest()


@pytest.mark.parametrize(
    ("lacking", "decodes"),
    [(("prep_recv",), ["b", "c"]), (("remote_send",), ["a", "b", "c"])],
)
@in_virtual_time
async def test_prefill_decode_uses_engines_that_can_receive_and_send(lacking, decodes):
    kinds = {"a": without(*lacking), "b": without(), "c": without()}
    seen = set()
    async with deployed(kinds, "prefill_decode") as router:
        for number in range(9):
            _, receipt = await router.complete([*PROMPT, number], 2)
            assert receipt.fallbacks == [] and not receipt.retries
            seen.update(engines_of(receipt, "start_generate"))
            if lacking == ("remote_send",):
                assert engines_of(receipt, "remote_send") != ["a"]
        await router.check_at_rest()
    assert sorted(seen) == decodes


@in_virtual_time
async def test_migrate_moves_a_context_within_its_group():
    async with deployed(MIXED, "migrate", overload=0) as router:
        _, first = await router.complete(PROMPT, 2)
        (home,) = engines_of(first, "start_generate")
        await asyncio.sleep(2)
        many = await asyncio.gather(*(router.complete([*PROMPT, 9], 40) for _ in range(8)))
        sends = [leg for _, receipt in many for leg in receipt.legs if leg.call == "remote_send"]
        assert sends and all(leg.engine == home for leg in sends)
        receivers = {each for _, receipt in many for each in engines_of(receipt, "commit")}
        assert receivers and {GROUP[each] for each in receivers} == {GROUP[home]}
        await router.check_at_rest()


# Prefixes


@in_virtual_time
async def test_an_engine_that_reports_no_prefixes_counts_as_caching_nothing():
    kinds = {"a": without("prefixes"), "b": without()}
    async with deployed(kinds, "cache_aware", load_weight=0.0) as router:
        _, first = await router.complete(PROMPT, 2)
        assert first.fallbacks == ["prefixes_unknown"]
        await asyncio.sleep(2)
        registry = router.execution.runtime.registry
        request = Request("x", PROMPT, Sampling())
        assert registry.prefixes.cached(registry["a"], request, 100) == 0
        (metric,) = router.execution.runtime.metrics.fallbacks.collect()
        (count,) = [one for one in metric.samples if one.name.endswith("_total")]
        assert count.value == 1.0  # once for a request, however many engines it asked
        assert [*registry.prefixes._views] == [registry["b"]]
        with pytest.raises(Unsupported, match="a does not support prefixes"):
            await registry.prefixes.known(registry["a"])


@in_virtual_time
async def test_engines_with_other_pages_have_other_names_for_a_prefix():
    kinds = {"a": without(), "b": without(kv="other")}
    async with deployed(kinds, "cache_aware", page_sizes={"b": 32}) as router:
        registry = router.execution.runtime.registry

        async def compute(name: str) -> None:
            @strategy
            async def there(request: Request, cluster: Any):
                (engine,) = [each for each in cluster.engines if each.id == name]
                engine.cached(request)
                async for chunk in engine.start_generate(request):
                    yield chunk

            router.use(there)
            await router.complete(PROMPT, 1)

        for name in ("a", "b"):
            await compute(name)
        await asyncio.sleep(2)
        request = Request("x", PROMPT, Sampling())
        cached = {each.id: registry.prefixes.cached(each, request, 99) for each in registry}
        assert cached == {"a": 96, "b": 96}
        assert {each.id: registry.prefixes.cached(each, request, 90) for each in registry} == {
            "a": 80, "b": 64,
        }  # fmt: skip


@pytest.mark.parametrize(
    ("kinds", "error", "says"),
    [
        ((without(), without(kv="other")), BadRequest, "engines a and b have different KV"),
        ((without("prefixes"), without()), Unsupported, "engine a does not support prefixes"),
        ((without("remote_send"), without()), Unsupported, "a does not support remote_send"),
        ((without(), without("commit")), Unsupported, "engine b does not support commit"),
        ((without(), without("prep_recv")), Unsupported, "engine b does not support prep_recv"),
        ((without("pin"), without()), Unsupported, "engine a does not support pin"),
        ((without(), without("pin")), Unsupported, "engine b does not support pin"),
    ],
)
@in_virtual_time
async def test_a_migration_that_cannot_be_is_refused_before_it_begins(kinds, error, says):
    async with deployed(dict(zip("ab", kinds, strict=True)), "data_parallel") as router:
        runtime = router.execution.runtime
        a, b = runtime.registry
        with pytest.raises(error, match=says):
            await migrate_prefix(runtime, {}, PROMPT, a, b, pin=True)
        await router.check_at_rest()


# Forks


class Writer(ChoiceWriter):
    def send(self, chunk: Chunk) -> None:
        pass


async def two_choices(router: VirtualDeployment) -> tuple[list[list[int]], Receipt]:
    receipt = Receipt("n", router.revision.number, "x", {}, 0, len(PROMPT))
    choices = Choices(2)
    runner = ChoiceRunner(router.execution, router.revision, receipt, {}, 0.0)
    writers = [Writer(receipt), Writer(receipt)]

    async def run(choice: int) -> None:
        sampling = Sampling(max_tokens=3, temperature=0.0, ignore_eos=True, choice=choice)
        await runner.run(Request("n", PROMPT, sampling), writers[choice], choices)

    await asyncio.gather(run(0), run(1))
    return [writer.tokens for writer in writers], receipt


@pytest.mark.parametrize("kind", [without(), without("fork")])
@in_virtual_time
async def test_choices_of_an_engine_without_forks_run_there_all_the_same(kind, monkeypatch):
    bodies: list[dict[str, Any]] = []
    start = VirtualCalls.start_generate

    async def noted(self: VirtualCalls, body: dict[str, Any], headers: Any) -> Any:
        bodies.append(body)
        return await start(self, body, headers)

    monkeypatch.setattr(VirtualCalls, "start_generate", noted)
    async with deployed({"a": kind, "b": kind}, "data_parallel") as router:
        tokens, receipt = await two_choices(router)
        assert tokens == [output_tokens(PROMPT, 3, choice=choice) for choice in range(2)]
        assert len(set(engines_of(receipt, "start_generate"))) == 1 and not receipt.retries
        forks = "fork" in kind.capabilities
        assert [("forks" in body, "fork_of" in body) for body in bodies] == [
            (forks, False), (False, forks),
        ]  # fmt: skip
        await router.check_at_rest()


# Continuing elsewhere


@pytest.mark.parametrize(
    ("sampled", "kind", "inexact"),
    [
        ({}, without("resume"), False),
        ({"temperature": 0.5}, without("resume"), True),
        ({"frequency_penalty": 0.5}, without("resume"), True),
        ({"presence_penalty": 0.5}, without("resume"), True),
        ({"repetition_penalty": 1.5}, without("resume"), True),
        ({"temperature": 0.5, "presence_penalty": 0.5}, without(), False),
    ],
)
@in_virtual_time
async def test_a_sampled_output_continues_inexactly_and_says_so(sampled, kind, inexact):
    async with deployed({"a": kind, "b": kind}, "data_parallel", most_at_once=1) as router:
        router.fleet.dies_after = [4]
        tokens, receipt = await router.complete(PROMPT, 9, **sampled)
        assert len(tokens) == 9 and len(receipt.retries) == 1
        assert tokens[:4] == output_tokens(PROMPT, 9)[:4]  # what was emitted is kept
        assert ("inexact_resume" in receipt.fallbacks) == inexact
        _, whole = await router.complete(PROMPT, 9, **sampled)
        assert "inexact_resume" not in whole.fallbacks


async def drained(router: VirtualDeployment, after_s: float) -> tuple[list[int], Receipt]:
    """Run a request, and drain its engine after a time."""
    registry = router.execution.runtime.registry
    running = asyncio.create_task(router.complete(PROMPT, 60))
    await asyncio.sleep(after_s)
    (busy,) = [each for each in registry if not each.load.idle]
    assert registry.drain(busy, True) == 1
    return await running


@pytest.mark.parametrize(
    ("kinds", "moves"),
    [
        (MIXED, True),
        ({each: MIXED[each] for each in ("b", "d", "a")}, True),
        ({"a": without(), "b": without(kv="other")}, False),
        ({"a": without("remote_send"), "b": without("remote_send")}, False),
        ({"a": without("prep_recv"), "b": without("prep_recv")}, False),
        ({"a": without("commit", "mirror"), "b": without("commit", "mirror")}, True),
    ],
)
@in_virtual_time
async def test_a_drained_generation_moves_within_its_group_or_is_computed_again(kinds, moves):
    pages = {"b": 32, "d": 32} if len(kinds) > 2 else {}
    async with deployed(kinds, "data_parallel", page_sizes=pages, most_at_once=1) as router:
        tokens, receipt = await drained(router, 0.122)
        assert tokens == output_tokens(PROMPT, 60)
        old, new = engines_of(receipt, "start_generate")
        assert [retry["error"]["type"] for retry in receipt.retries] == ["draining"]
        recomputed = [leg.recomputed_tokens for leg in receipt.legs if leg.engine == new][-1]
        if moves:
            assert engines_of(receipt, "remote_send") == [old]
            page = pages.get(old, PAGE)
            assert kinds[old].kv == kinds[new].kv and recomputed <= page
            (sent,) = [leg for leg in receipt.legs if leg.call == "remote_send"]
            assert sent.end == {16: 112, 32: 96}[page]
        else:
            assert not engines_of(receipt, "remote_send") and recomputed >= len(PROMPT)
        assert ("not_sent" in receipt.fallbacks) != moves
        await router.check_at_rest()

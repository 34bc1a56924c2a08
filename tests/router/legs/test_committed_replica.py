"""Replicas in the prefix cache of a peer, for engines without mirrors; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from virtual_deployment import VirtualDeployment, virtual_deployment
from virtual_time import in_virtual_time

from engine.latency import FixedLatency, Profile, PutLatency
from engine.protocol import ALL_CAPABILITIES, NoCapacity, RemoteSendReply
from engine.virtual import EngineKind, output_tokens
from router import Mirror, strategy
from router.base import Request
from router.simulation.fleet import VirtualCalls
from router.telemetry import Receipt

PAGE = 16
PROFILE = Profile(
    name="test", model="test", device="none", gpus=0, source="made up", layers=2,
    kv_bytes_per_token=100, context_length=4096, pool_tokens=1 << 14,
    step=FixedLatency(step_ms=10.0, prompt_tokens_per_ms=1.0),
    put=PutLatency(bandwidth=1e9),
)  # fmt: skip
PROMPT = [(7 * i * i + 3 * i) % 900 + 1 for i in range(100)]
NEW = 90


def without(*lacking: str, kv: str = "") -> EngineKind:
    return EngineKind(tuple(each for each in ALL_CAPABILITIES if each not in lacking), kv)


PLAIN = without("mirror")
Call = tuple[str, str, int]


class Calls:
    """The copies that are made: the calls by engine, and how many ran at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Call] = []
        self.running: set[str] = set()
        self.most = 0
        self.gate: asyncio.Event | None = None  # what sends wait for
        self.full: set[str] = set()  # engines without room
        prepare, send, commit = (
            VirtualCalls.prep_recv, VirtualCalls.remote_send, VirtualCalls.commit,
        )  # fmt: skip
        calls = self

        async def prep_recv(self: VirtualCalls, body: Any, headers: Any) -> Any:
            calls._note(self, "prep_recv", body["end"])
            if calls._name(self) in calls.full:
                raise NoCapacity("full")
            return await prepare(self, body, headers)

        async def remote_send(self: VirtualCalls, body: Any, headers: Any) -> RemoteSendReply:
            calls._note(self, "remote_send", body["end"])
            calls.running.add(body["request_id"])
            calls.most = max(calls.most, len(calls.running))
            try:
                if calls.gate is not None:
                    await calls.gate.wait()
                return await send(self, body, headers)
            finally:
                calls.running.discard(body["request_id"])

        async def commits(self: VirtualCalls, body: Any, headers: Any) -> None:
            calls._note(self, "commit", 0)
            await commit(self, body, headers)

        monkeypatch.setattr(VirtualCalls, "prep_recv", prep_recv)
        monkeypatch.setattr(VirtualCalls, "remote_send", remote_send)
        monkeypatch.setattr(VirtualCalls, "commit", commits)

    @staticmethod
    def _name(calls: VirtualCalls) -> str:
        return calls.engine.config.engine_id

    def _note(self, calls: VirtualCalls, call: str, end: int) -> None:
        self.made.append((self._name(calls), call, end))

    def ends(self, call: str) -> list[int]:
        return [end for _, made, end in self.made if made == call]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    yield Calls(monkeypatch)


def deployed(kinds: dict[str, EngineKind], **params: Any) -> Any:
    engines = dict.fromkeys(kinds, ("any", PROFILE))
    return virtual_deployment(engines, "replicate", kinds=kinds, most_at_once=1, **params)


def generations(receipt: Receipt) -> list[Any]:
    return [leg for leg in receipt.legs if leg.call == "start_generate"]


@in_virtual_time
async def test_full_pages_are_copied_as_the_output_grows(calls):
    async with deployed({"a": PLAIN, "b": PLAIN}, every=20) as router:
        tokens, receipt = await router.complete(PROMPT, NEW)
        assert tokens == output_tokens(PROMPT, NEW)
        (leg,) = generations(receipt)
        other = {"a": "b", "b": "a"}[leg.engine]
        # The prompt's pages first; then two pages at a time, as 20 tokens exceed one.
        assert calls.ends("prep_recv") == calls.ends("remote_send") == [96, 128, 160]
        assert [name for name, call, _ in calls.made if call != "remote_send"] == [other] * 6
        assert [name for name, call, _ in calls.made if call == "remote_send"] == [leg.engine] * 3
        assert calls.made[2][1] == "commit" and calls.most == 1
        assert receipt.fallbacks == ["mirrors_committed_prefixes"]
        assert (leg.replica, leg.landed, leg.mirror_error) == (other, 160, None)
        for backend in router.execution.runtime.registry:
            assert not backend.replicas and not backend.mirrored
        await router.check_at_rest()


@pytest.mark.parametrize("every", [1, 16, 40])
@in_virtual_time
async def test_the_strategy_runs_again_where_the_pages_are_cached(calls, every):
    async with deployed(dict.fromkeys("abc", PLAIN), every=every) as router:
        router.fleet.dies_after = [60]
        tokens, receipt = await router.complete(PROMPT, NEW)
        assert tokens == output_tokens(PROMPT, NEW)
        first, second = generations(receipt)
        assert second.engine == first.replica and len(receipt.retries) == 1
        step = -(-every // PAGE) * PAGE
        assert second.begin >= first.landed >= len(PROMPT) + 60 - 1 - step - PAGE
        assert second.recomputed_tokens <= step + 2 * PAGE
        assert second.replica not in (None, first.engine, second.engine)  # the third engine
        assert receipt.fallbacks == ["mirrors_committed_prefixes"]  # not `recomputed`
        await router.check_at_rest()


@in_virtual_time
async def test_without_a_copy_there_is_no_replica(calls):
    calls.gate = asyncio.Event()  # no copy ends
    async with deployed({"a": PLAIN, "b": PLAIN}) as router:
        router.fleet.dies_after = [30]
        tokens, receipt = await router.complete(PROMPT, NEW)
        assert tokens == output_tokens(PROMPT, NEW)
        assert generations(receipt)[1].begin == 0
        assert set(receipt.fallbacks) == {
            "mirrors_committed_prefixes", "recomputed", "collapsed", "unmirrored",
        }  # fmt: skip
        await router.check_at_rest()


@in_virtual_time
async def test_a_rerun_that_is_refused_waits_and_goes_on(calls, monkeypatch):
    start, refusals = VirtualCalls.start_generate, [NoCapacity("full", retry_after_s=0.5)]

    async def refuses(self: VirtualCalls, body: Any, headers: Any) -> Any:
        if body.get("output") and refusals:
            raise refusals.pop()
        return await start(self, body, headers)

    monkeypatch.setattr(VirtualCalls, "start_generate", refuses)
    async with deployed(dict.fromkeys("abc", PLAIN)) as router:
        router.fleet.dies_after = [60]
        tokens, receipt = await router.complete(PROMPT, NEW)
        assert tokens == output_tokens(PROMPT, NEW) and not refusals
        first, *_, last = generations(receipt)
        assert last.engine == first.replica  # the replica is not used up
        assert last.begin == first.landed > len(PROMPT)
        await router.check_at_rest()


@in_virtual_time
async def test_one_copy_at_a_time_and_the_stream_does_not_wait_for_it(calls):
    calls.gate = asyncio.Event()
    async with deployed({"a": PLAIN, "b": PLAIN}) as router:
        began = asyncio.get_running_loop().time()
        running = asyncio.create_task(router.complete(PROMPT, NEW))
        await asyncio.sleep(0.6)
        assert calls.ends("prep_recv") == [96]
        calls.gate.set()
        _, receipt = await running
        # 10 ms for each token, and 100 for the prompt.
        assert asyncio.get_running_loop().time() - began == pytest.approx(1.0, abs=0.1)
        # What had grown meanwhile was copied at once.
        assert calls.ends("prep_recv")[1] > 96 + 2 * PAGE and calls.most == 1
        assert generations(receipt)[0].landed >= 176
        await router.check_at_rest()


@in_virtual_time
async def test_an_end_ends_the_copy_that_runs(calls):
    calls.gate = asyncio.Event()
    async with deployed({"a": PLAIN, "b": PLAIN}) as router:
        await router.complete(PROMPT, 20)
        assert calls.ends("prep_recv") == [96] and not calls.ends("commit")
        await router.check_at_rest()  # no lease is left


@pytest.mark.parametrize("gated", [True, False])
@in_virtual_time
async def test_a_client_that_leaves_ends_the_copies(calls, gated):
    calls.gate = asyncio.Event() if gated else None
    async with deployed({"a": PLAIN, "b": PLAIN}) as router:
        for after_s in (0.1, 0.1005, 0.101, 0.1025, 0.11, 0.2, 0.5):
            running = asyncio.create_task(router.complete(PROMPT, NEW))
            await asyncio.sleep(after_s)
            running.cancel()
            await asyncio.wait([running])
            await router.check_at_rest()


@in_virtual_time
async def test_an_engine_without_room_is_passed_over(calls):
    calls.full.update("b")
    async with deployed(dict.fromkeys("abc", PLAIN)) as router:
        await router.complete(PROMPT, 3)  # on `a`
        calls.made.clear()
        router.use("replicate", every=16)
        await router.complete(PROMPT, 3)  # on `b`
        calls.made.clear()

        @strategy
        async def on_a(request: Request, cluster: Any):
            engine = next(iter(cluster.engines))
            async for chunk in engine.start_generate(request, mirror=Mirror(16)):
                yield chunk

        router.use(on_a)
        _, receipt = await router.complete([1, *PROMPT], 30)
        (leg,) = generations(receipt)
        assert (leg.engine, leg.replica, leg.mirror_error) == ("a", "c", None)
        assert "unmirrored" not in receipt.fallbacks
        await router.check_at_rest()


@in_virtual_time
async def test_copies_that_nobody_takes_are_tried_again_later(calls):
    calls.full.update("ab")
    async with deployed({"a": PLAIN, "b": PLAIN}) as router:
        running = asyncio.create_task(router.complete(PROMPT, 400))
        await asyncio.sleep(0.5)
        assert calls.ends("prep_recv") == [96]  # it pauses
        calls.full.clear()
        _, receipt = await running
        assert receipt.fallbacks == ["mirrors_committed_prefixes", "unmirrored"]
        (leg,) = generations(receipt)
        assert leg.landed > 400 and leg.mirror_error is None
        await router.check_at_rest()


@in_virtual_time
async def test_the_replicas_engine_is_replaced_when_it_dies_or_drains(calls):
    async with deployed(dict.fromkeys("abc", PLAIN)) as router:
        registry = router.execution.runtime.registry
        for leave in ("dies", "drains"):
            running = asyncio.create_task(router.complete(PROMPT, NEW))
            await asyncio.sleep(0.3)
            (busy,) = [each for each in registry if each.load.streams]
            (replica,) = busy.mirrored
            here = replica.backend
            if leave == "drains":
                assert registry.drain(here, True) == 0
            else:
                here.go_down("it is dead")
            await asyncio.sleep(0.05)
            assert [*busy.mirrored] != [replica]
            tokens, receipt = await running
            assert tokens == output_tokens(PROMPT, NEW) and not receipt.retries
            assert generations(receipt)[0].replica not in (here.id, busy.id)
            here.status, here.draining = "up", False
            await router.check_at_rest()


@pytest.mark.parametrize(
    ("kinds", "copies", "fallbacks"),
    [
        # An engine that mirrors has a real replica if a peer can hold it.
        ({"a": without(), "b": without()}, 0, []),
        ({"a": without(), "b": PLAIN}, 1, ["mirrors_committed_prefixes"]),
        ({"a": PLAIN, "b": without()}, 1, ["mirrors_committed_prefixes"]),
        # Neither is possible.
        ({"a": PLAIN, "b": without("commit", "mirror")}, 0, ["unmirrored"]),
        ({"a": without("mirror", "remote_send"), "b": PLAIN}, 0, ["unmirrored"]),
        ({"a": PLAIN, "b": without("mirror", "prep_recv")}, 0, ["unmirrored"]),
        ({"a": PLAIN, "b": without("mirror", kv="other")}, 0, ["unmirrored"]),
        ({"a": without(), "b": without(kv="other")}, 0, ["unmirrored"]),
        ({"a": without("mirror", "remote_send"), "b": without()}, 0, ["unmirrored"]),
    ],
)
@in_virtual_time
async def test_what_a_replica_needs(calls, kinds, copies, fallbacks):
    @strategy
    async def on_a(request: Request, cluster: Any):
        engine = next(iter(cluster.engines))
        async for chunk in engine.start_generate(request, mirror=Mirror(16)):
            yield chunk

    async with deployed(kinds) as router:
        router.use(on_a)
        tokens, receipt = await router.complete(PROMPT, 12)
        assert tokens == output_tokens(PROMPT, 12)
        assert receipt.fallbacks == fallbacks
        assert len(calls.ends("commit")) == copies
        await router.check_at_rest()


@in_virtual_time
async def test_a_short_prompt_has_no_page_to_copy(calls):
    async with deployed({"a": PLAIN, "b": PLAIN}) as router:
        await router.complete([1, 2, 3], 13)
        assert calls.made == []
        await router.complete([1, 2, 3], 18)
        assert calls.ends("remote_send") == [16]  # the last token has no KV


@in_virtual_time
async def test_copies_go_to_the_engine_that_the_strategy_wants(calls):
    @strategy
    async def on_a(request: Request, cluster: Any):
        engine = next(iter(cluster.engines))
        mirror = Mirror(16, key=lambda other: other.id != "d")
        async for chunk in engine.start_generate(request, mirror=mirror):
            yield chunk

    async with deployed(dict.fromkeys("abcd", PLAIN)) as router:
        router.use(on_a)
        _, receipt = await router.complete(PROMPT, 12)
        assert generations(receipt)[0].replica == "d"
        await router.check_at_rest()


async def relocated(router: VirtualDeployment) -> Receipt:
    registry = router.execution.runtime.registry
    running = asyncio.create_task(router.complete(PROMPT, NEW))
    await asyncio.sleep(0.5)
    (busy,) = [each for each in registry if each.load.streams]
    assert registry.drain(busy, True) == 1
    tokens, receipt = await running
    assert tokens == output_tokens(PROMPT, NEW)
    return receipt


@in_virtual_time
async def test_a_drained_generation_goes_on_where_its_copy_is(calls):
    async with deployed(dict.fromkeys("abc", PLAIN)) as router:
        receipt = await relocated(router)
        first, second = generations(receipt)
        assert second.engine == first.replica and second.recomputed_tokens <= 2 * PAGE + 1
        await router.check_at_rest()

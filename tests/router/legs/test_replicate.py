"""Engine processes that die, hang or are drained in mid-stream: each request continues with its KV
on another engine, and its client sees no difference."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineProcess
from waiting import until

pytestmark = pytest.mark.processes

SECRET = "6f" * 32
FLAGS = ("--pool-pages", "1024")
PROMPT = [(7 * i * i + 3 * i) % 500 + 1 for i in range(200)]
EVERY = 8
ASK = {
    "prompt": PROMPT, "max_tokens": 300, "return_token_ids": True, "ignore_eos": True,
    "stream": True, "stream_options": {"include_usage": True},
}  # fmt: skip
DIGITS = {"structured_outputs": {"regex": "[0-9]{320}"}, "temperature": 1, "seed": 9}
STYLES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seed and logprobs": {"temperature": 0.9, "top_p": 0.95, "seed": 5, "logprobs": 2},
    "penalties": {
        "temperature": 0.7, "seed": 2, "frequency_penalty": 0.6, "presence_penalty": 0.4,
        "repetition_penalty": 1.1,
    },
    "structured": DIGITS,
    "stop": {"temperature": 0, "stop": ["STOP"]},
    "long": {"temperature": 0.5, "seed": 8, "max_tokens": 1000},
    "n": {"temperature": 1, "seed": 4, "n": 3},
}  # fmt: skip
KINDS = [style for style in STYLES if style != "long"]
HARD = ("seed and logprobs", "structured", "n")  # with more state than their tokens
CASES = [
    style if style in HARD else pytest.param(style, marks=pytest.mark.thorough) for style in KINDS
]


class Fleet:
    """Engine processes that tests stop, kill and restart."""

    def __init__(self, *names: str, flags: tuple[str, ...] = ()) -> None:
        self._flags = flags
        self.engines = {name: self._start(name) for name in names}
        self._dead: set[str] = set()

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.engines.values()]

    def send_signal(self, name: str, number: signal.Signals) -> None:
        self.engines[name].signal(number)
        if number == signal.SIGKILL:
            self._dead.add(name)

    def repair(self) -> None:
        """Continue stopped engines, check that live ones are clean, and replace dead ones."""
        for name, engine in self.engines.items():
            if name in self._dead:
                engine.kill()
                self.engines[name] = self._start(name, engine.port)
            else:
                engine.signal(signal.SIGCONT)
                engine.at_rest(15)
        self._dead.clear()

    def stop(self) -> None:
        for engine in self.engines.values():
            engine.kill()

    def _start(self, name: str, port: int = 0) -> EngineProcess:
        flags = (*FLAGS, *self._flags, "--engine-id", name)
        return EngineProcess(*flags, secret=SECRET, port=port)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet("a", "b", "c")
    yield fleet
    fleet.stop()


@pytest.fixture(scope="module")
def oracle() -> Iterator[tuple[str, dict[str, Answer]]]:
    """Yield the URL of an undisturbed engine, and a cache of its answers."""
    fleet = Fleet("oracle")
    yield fleet.urls[0], {}
    fleet.stop()


@dataclass
class Choice:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Answer:
    """A streamed answer as a client has received it."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    cached_tokens: int = 0

    def add(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        if usage := event.get("usage"):
            self.usage = {name: n for name, n in usage.items() if isinstance(n, int)}
            self.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        for item in event["choices"]:
            choice = self.choices.setdefault(item["index"], Choice())
            choice.tokens += item["token_ids"] or []
            choice.text += item["text"]
            if given := item.get("logprobs"):
                names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
                choice.logprobs += zip(*(given[name] for name in names), strict=True)
            choice.finish_reason = item["finish_reason"] or choice.finish_reason


async def ask(
    r: Any,
    body: dict[str, Any],
    request_id: str = "x",
    at: int = 0,
    then: Callable[[], Awaitable[None]] | None = None,
) -> Answer:
    """Stream one answer; call `then` once, when each choice has `at` tokens."""
    answer = Answer()
    headers = {"X-Request-Id": request_id}
    url = r.server.url + "/v1/completions"
    async with r.http.post(url, json={**ASK, **body}, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            answer.add(json.loads(line[6:]))
            begun = [len(choice.tokens) >= at for choice in answer.choices.values()]
            if then is not None and len(begun) == body.get("n", 1) and all(begun):
                then, act = None, then
                await act()
    assert then is None, "it ended before anything happened"
    return answer


@pytest.fixture
def undisturbed(oracle: Any, routed_to: Any) -> Callable[[str], Awaitable[Answer]]:
    """Return an undisturbed engine's answer; each style is requested once."""

    async def answer(style: str) -> Answer:
        url, answers = oracle
        if style not in answers:
            async with routed_to([url]) as r:
                answers[style] = await ask(r, STYLES[style])
        return answers[style]

    return answer


@pytest.fixture
def replicated(
    fleet: Fleet, routed_to: Any
) -> Iterator[Callable[..., AbstractAsyncContextManager[Any]]]:
    """A router over the fleet with the strategy `replicate`; each token is an event of its own.

    At the end, nothing may be left on any engine.
    """

    def start(**config: Any) -> AbstractAsyncContextManager[Any]:
        config = {"strategy": "replicate", "params": {"every": EVERY}, **config}
        return routed_to(fleet.urls, stream_interval_ms=0, **config)

    yield start
    fleet.repair()


def same(got: Answer, wanted: Answer) -> None:
    """Compare answers, naming only the differences."""
    assert got.usage == wanted.usage
    assert got.choices.keys() == wanted.choices.keys()
    for index, choice in wanted.choices.items():
        other = got.choices[index]
        assert other.finish_reason == choice.finish_reason
        assert other.tokens == choice.tokens
        assert other.text == choice.text
        differing = [
            (at, *pair)
            for at, pair in enumerate(zip(other.logprobs, choice.logprobs, strict=True))
            if pair[0] != pair[1]
        ]
        assert not differing


def running(r: Any) -> str:
    """Return the engine with most of this router's streams."""
    return max(r.server.router.registry, key=lambda backend: backend.load.streams).id


def generations(receipt: dict[str, Any], choice: int = 0) -> list[dict[str, Any]]:
    legs = receipt["legs"]
    return [leg for leg in legs if leg["call"] == "start_generate" and leg["choice"] == choice]


def after(name: str) -> str:
    """Return the engine that follows `name` in the ring of engines."""
    return {"a": "b", "b": "c", "c": "a"}[name]


def landed(r: Any, tokens: int = EVERY, request_id: str = "x") -> bool:
    """Return whether each running choice has this many tokens of output on a replica."""
    legs = [leg for leg in r.server.router.receipts[request_id].legs if leg.ms is None]
    return bool(legs) and all((leg.landed or 0) >= len(PROMPT) + tokens for leg in legs)


async def send_signal(fleet: Any, r: Any, number: signal.Signals) -> str:
    """Signal the engine that generates once its replica is up to date; return the engine."""
    await until(lambda: landed(r))
    victim = running(r)
    await asyncio.to_thread(fleet.send_signal, victim, number)
    return victim


def continued(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Check that KV known to have landed was not computed again."""
    again = second["recomputed_tokens"]
    return bool(1 <= again <= max(1, second["end"] - first["landed"]))


@pytest.mark.slow
@pytest.mark.parametrize("style", CASES)
async def test_requests_of_a_killed_engine_continue_on_the_next(
    fleet, replicated, undisturbed, style
):
    wanted = await undisturbed(style)
    async with replicated() as r:
        victim = ""

        async def kill() -> None:
            nonlocal victim
            victim = await send_signal(fleet, r, signal.SIGKILL)

        answer = await ask(r, STYLES[style], at=20, then=kill)
        same(answer, wanted)
        receipt = await r.receipt("x")
        for choice in answer.choices:
            first, second = generations(receipt, choice)
            assert first["engine"] == victim
            assert first["replica"] == second["engine"] == after(victim)
            assert continued(first, second)
            # What the request itself has computed does not count as cached.
            assert second["cached_tokens"] == first["cached_tokens"] == first["begin"]
            # The new stream has a replica of its own again.
            assert second["replica"] == after(after(victim))
        assert receipt["fallbacks"] == []
        await r.settled()


@pytest.mark.slow
async def test_requests_of_a_stopped_engine_continue_on_the_next(fleet, replicated, undisturbed):
    """When the stopped engine continues later, it disturbs nothing and leaves nothing behind."""
    wanted = await undisturbed("greedy")
    async with replicated(health_timeout_s=2.0) as r:
        victim = ""

        async def stop() -> None:
            nonlocal victim
            victim = await send_signal(fleet, r, signal.SIGSTOP)

        same(await ask(r, STYLES["greedy"], at=20, then=stop), wanted)
        first, second = generations(await r.receipt("x"))
        assert (first["engine"], second["engine"]) == (victim, after(victim))
        assert continued(first, second)
        await r.settled()


@pytest.mark.slow
async def test_a_replica_whose_engine_dies_is_replaced(fleet, replicated, undisturbed):
    """The replica dies while the generation runs; then its engine dies as well."""
    wanted = await undisturbed("long")
    async with replicated() as r:
        victim = ""

        async def kill_both() -> None:
            nonlocal victim
            victim = running(r)
            await until(lambda: landed(r))
            await asyncio.to_thread(fleet.send_signal, after(victim), signal.SIGKILL)
            (leg,) = r.server.router.receipts["x"].legs
            await until(lambda: leg.replica == after(after(victim)))
            engines = {one["id"]: one for one in (await r.get("/admin/engines"))["engines"]}
            assert engines[victim]["mirrored"]["requests"] == 1
            assert engines[victim]["mirrored"]["to"] == {after(after(victim)): 1}
            assert engines[after(after(victim))]["replicas"] == 1
            assert engines[after(victim)]["replicas"] == 0
            await until(lambda: landed(r) and leg.mirror_error is None)
            await asyncio.to_thread(fleet.send_signal, victim, signal.SIGKILL)

        same(await ask(r, STYLES["long"], at=5, then=kill_both), wanted)
        receipt = await r.receipt("x")
        first, second = generations(receipt)
        assert first["replica"] == second["engine"] == after(after(victim))
        assert continued(first, second)
        assert receipt["fallbacks"] == ["collapsed", "unmirrored"]  # only one engine is left
        await r.settled()


@pytest.mark.slow
async def test_when_engine_and_replica_die_at_once_the_kv_is_recomputed(
    fleet, replicated, undisturbed
):
    wanted = await undisturbed("seed and logprobs")
    async with replicated() as r:
        victim = ""

        async def kill_both() -> None:
            nonlocal victim
            victim = running(r)
            # The first engine dies before it opens another replica.
            await asyncio.to_thread(fleet.send_signal, victim, signal.SIGSTOP)
            for name in (after(victim), victim):
                await asyncio.to_thread(fleet.send_signal, name, signal.SIGKILL)

        same(await ask(r, STYLES["seed and logprobs"], at=20, then=kill_both), wanted)
        receipt = await r.receipt("x")
        *_, last = generations(receipt)
        assert last["engine"] == after(after(victim))
        assert "recomputed" in receipt["fallbacks"], receipt
        async with r.http.get(r.server.url + "/metrics") as reply:
            text = await reply.text()
        assert 'microserve_router_fallbacks_total{fallback="recomputed"} 1.0' in text
        await r.settled()


@pytest.mark.slow
async def test_with_two_engines_draining_one_moves_to_the_other(fleet, routed_to, undisturbed):
    wanted = await undisturbed("greedy")
    async with routed_to(fleet.urls[:2], strategy="prefill_decode") as r:
        left = ""

        async def drain() -> None:
            nonlocal left
            left = running(r)
            url = f"{r.server.url}/admin/engines/{left}"
            async with r.http.patch(url, json={"draining": True}) as reply:
                assert (await reply.json())["moved"] == 1

        same(await ask(r, STYLES["greedy"], at=20, then=drain), wanted)
        *_, last = generations(await r.receipt("x"))
        assert last["engine"] != left and 1 <= last["recomputed_tokens"] <= 16


@pytest.mark.slow
async def test_a_single_engine_has_no_replica_and_the_receipt_says_so(
    fleet, routed_to, undisturbed
):
    wanted = await undisturbed("greedy")
    async with routed_to(fleet.urls[:1], strategy="replicate") as r:
        same(await ask(r, STYLES["greedy"]), wanted)
        receipt = await r.receipt("x")
        assert receipt["fallbacks"] == ["collapsed", "unmirrored"]
        (leg,) = receipt["legs"]
        assert leg["replica"] is None and leg["landed"] is None


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[Fleet]:
    """One engine, whose replica is a file."""
    lone = Fleet("lone", flags=("--disk-pages", "256", "--disk-dir", str(tmp_path), "--disk-keep"))
    yield lone
    lone.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    "style",
    [
        style if style == "seed and logprobs" else pytest.param(style, marks=pytest.mark.thorough)
        for style in KINDS
    ],
)
async def test_a_restarted_single_engine_continues_from_its_disk(
    lone, routed_to, undisturbed, style
):
    wanted = await undisturbed(style)
    async with routed_to(lone.urls, engine_wait_s=30, stream_interval_ms=0) as r:
        pages = len(PROMPT) // 16 + 1  # plus one of output

        def on_disk() -> bool:
            (tier,) = lone.engines["lone"].state()["tiers"]
            return bool(tier["cached"] >= pages)

        async def die() -> None:
            await until(on_disk)
            await asyncio.to_thread(lone.send_signal, "lone", signal.SIGKILL)
            await asyncio.to_thread(lone.repair)

        answer = await ask(r, STYLES[style], at=50, then=die)
        same(answer, wanted)
        receipt = await r.receipt("x")
        legs = [generations(receipt, choice) for choice in answer.choices]
        for first, second in legs:
            assert first["engine"] == second["engine"] == "lone"
            assert second["begin"] >= len(PROMPT) - 8
        assert max(second["begin"] for _, second in legs) >= len(PROMPT) + 8
        await r.settled()


@pytest.mark.slow
async def test_the_wait_for_a_dead_engine_is_bounded(lone, routed_to):
    async with routed_to(lone.urls, engine_wait_s=1.0, stream_interval_ms=0) as r:
        died = 0.0

        async def die() -> None:
            nonlocal died
            await asyncio.to_thread(lone.send_signal, "lone", signal.SIGKILL)
            died = time.monotonic()

        with pytest.raises(AssertionError, match="no_engines"):
            await ask(r, {}, at=20, then=die)
        assert 0.9 < time.monotonic() - died < 30
        # Requests that have not begun are refused at once and may be sent again.
        took = []
        for _ in range(3):
            before = time.monotonic()
            status, body = await r.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 5})
            assert (status, body["error"]["type"]) == (503, "no_engines")
            took.append(time.monotonic() - before)
        assert min(took) < 0.5  # a busy host may hold up some


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "style"),
    [
        *(
            pytest.param(
                "data_parallel", style, marks=() if style in HARD else pytest.mark.thorough
            )
            for style in KINDS
        ),
        ("prefill_decode", "greedy"),
        ("replicate", "seed and logprobs"),
        pytest.param("replicate", "n", marks=pytest.mark.thorough),
    ],
)
async def test_draining_moves_the_kv(fleet, replicated, undisturbed, strategy, style):
    """Any strategy recomputes only a partial page, or the tokens that the replica lacks."""
    wanted = await undisturbed(style)
    params = {"every": EVERY} if strategy == "replicate" else {}
    async with replicated(strategy=strategy, params=params) as r:
        left = ""

        async def drain() -> None:
            nonlocal left
            left = running(r)
            url = f"{r.server.url}/admin/engines/{left}"
            async with r.http.patch(url, json={"draining": True}) as reply:
                assert (await reply.json())["moved"] == len(wanted.choices)

        answer = await ask(r, STYLES[style], at=20, then=drain)
        same(answer, wanted)
        receipt = await r.receipt("x")
        for choice in answer.choices:
            first, second = generations(receipt, choice)
            assert first["engine"] == left != second["engine"]
            most = 2 * EVERY + 1 if strategy == "replicate" else 16
            assert 1 <= second["recomputed_tokens"] <= most
            assert first["mirror_error"] is None
        assert {retry["error"]["type"] for retry in receipt["retries"]} == {"draining"}
        assert answer.cached_tokens == generations(receipt)[0]["cached_tokens"]
        sends = [leg for leg in receipt["legs"] if leg["call"] == "remote_send"]
        assert all(leg["computed_tokens"] == 0 for leg in sends if leg["engine"] == left)
        await r.settled()

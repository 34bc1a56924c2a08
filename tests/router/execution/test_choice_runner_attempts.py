"""Which engines an attempt gets, when it waits, what it runs, and what its failure leaves."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from engine.protocol import Internal, NoCapacity, Sampling
from router.admission.retry_budget import RetryBudget
from router.base.config import RouterConfig
from router.base.errors import EngineUnreachable, Moved, NoEngines
from router.base.request import Chunk, Request
from router.execution import choice_runner as module
from router.execution.choice_runner import ChoiceRunner, _Choice
from router.telemetry import Metrics, Receipt

NEEDS = 3 + 5  # tokens of context: the prompt's and the output's
LABEL = "strategy mine (generation 1)"


class Registry:
    """A registry whose `usable` returns `answers` in turn, the last one again and again."""

    def __init__(self) -> None:
        self.answers: list[list[Any]] = [[]]
        self.asked: list[dict[str, Any]] = []
        self.waited: list[tuple[str, float, int]] = []
        self.is_short: Any = lambda backends, tokens: False
        self.rooms = SimpleNamespace(short=self._short, wait=self._wait)

    def _short(self, backends: list[Any], tokens: int) -> bool:
        return bool(self.is_short(backends, tokens))

    async def _wait(self, candidates: Any, tokens: int, deadline: float) -> None:
        self.waited.append(("room", deadline, tokens))
        candidates()

    def shortage(self, holding: int, filling: int) -> str:
        return f"short of {holding} and {filling} tokens"

    def usable(self, **wanted: Any) -> list[Any]:
        self.asked.append(wanted)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    async def settled(self, timeout: float) -> None:
        self.waited.append(("settled", timeout, 0))

    async def returned(self, timeout: float, *, holding: int) -> None:
        self.waited.append(("returned", timeout, holding))


class Parts:
    """A choice, and the parts of a router that it uses."""

    def __init__(
        self, output: tuple[int, ...] = (), choice: int = 0, choices: Any = None, **config: Any
    ) -> None:
        self.registry = Registry()
        self.metrics = Metrics()
        self.receipt: Any = Receipt("x", 1, "mine", {}, 0, 0)  # type: ignore[arg-type]
        self.waiters: list[str] = []
        self.turns: list[tuple[NoCapacity | None, float]] = []
        self.written: list[Chunk] = []
        self.read: list[Chunk] = []
        self.best: Any = None  # the replica that is left
        self.settled = 0
        runtime = SimpleNamespace(
            config=RouterConfig(**config), registry=self.registry, metrics=self.metrics,
            names=iter(["first", "second"]),
        )  # fmt: skip
        runner: Any = SimpleNamespace(
            execution=SimpleNamespace(runtime=runtime, queue=self.waiters),
            receipt=self.receipt, revision=SimpleNamespace(label=LABEL), arrived=1000.0,
            headers={"a": "b"},
        )  # fmt: skip
        sampling = Sampling(max_tokens=5, choice=choice)
        request = Request("x", [1, 2, 3], sampling, output=list(output))
        writer: Any = SimpleNamespace(tokens=[7, 8], write=self._write)
        place: Any = SimpleNamespace(wait=self._wait, admitted=self._admitted)
        replicas: Any = SimpleNamespace(settle=self._settle)
        self.claim = RetryBudget(0.0).request().__enter__()
        self.choice: Any = _Choice(runner, request, writer, choices, place, self.claim, replicas)

    async def _wait(self, full: NoCapacity | None, *, deadline: float) -> None:
        assert self.receipt.phase == "queue"
        self.turns.append((full, deadline))

    def _admitted(self) -> None: ...

    def _settle(self) -> Any:
        self.settled += 1
        return self.best

    def _write(self, chunk: Chunk) -> Any:
        self.written.append(chunk)
        return self._read(chunk) if chunk.text else None

    async def _read(self, chunk: Chunk) -> None:
        await asyncio.sleep(0)
        self.read.append(chunk)

    def count(self, name: str) -> float:
        """Return a counter of the metrics."""
        for line in self.metrics.render().decode().splitlines():
            if line.startswith(f"microserve_router_{name} "):
                return float(line.split()[-1])
        return 0.0


class Backend:
    """An engine, whose breaker is open if it `rests`."""

    def __init__(self, id: str, rests: bool) -> None:
        self.id = id
        self.breaker = SimpleNamespace(resting=rests)


def engine(id: str, *, rests: bool = False) -> Any:
    return Backend(id, rests)


A, B = engine("a"), engine("b")


# Engines


async def test_engines_that_are_up_are_taken_at_once():
    parts = Parts()
    parts.registry.answers = [[A, B]]
    parts.choice._failed = {A}
    assert await parts.choice._backends() == [A, B]
    assert parts.registry.asked == [{"without": {A}, "holding": NEEDS, "filling": NEEDS}]
    assert not parts.registry.waited


async def test_a_context_waits_for_room_and_is_then_placed_anew():
    parts = Parts()
    parts.registry.answers = [[A], [A], [B]]
    parts.registry.is_short = lambda backends, tokens: (backends, tokens) == ([A], NEEDS)
    assert await parts.choice._backends() == [B]
    deadline = 1000.0 + RouterConfig().queue_timeout_s
    assert parts.registry.waited == [("room", deadline, NEEDS)]
    parts = Parts(output=(5, 6))
    parts.choice._request.sampling.max_tokens = 999
    assert parts.choice._fills() == 3 + 2 + 128


@pytest.mark.parametrize(
    ("output", "wait_s", "answers", "waits"),
    [
        ((), 7.0, [[], [A]], ["settled"]),
        ((5,), 7.0, [[], [A]], ["settled"]),
        ((), 7.0, [[]], ["settled"]),  # it has not begun: the client may ask another router
        ((5,), 0.0, [[]], ["settled"]),
        ((5,), 7.0, [[], [], [A]], ["settled", "returned"]),
        ((5,), 7.0, [[]], ["settled", "returned"]),
    ],
)
async def test_only_a_choice_that_has_begun_waits_long_for_an_engine(
    output, wait_s, answers, waits
):
    parts = Parts(output, engine_wait_s=wait_s, health_timeout_s=3.0)
    parts.registry.answers = answers
    found = answers[-1]
    if found:
        assert await parts.choice._backends() == found
    else:
        with pytest.raises(NoEngines, match=r"^no engine is up$"):
            await parts.choice._backends()
    all_waits = [("settled", 3.0, 0), ("returned", 7.0, NEEDS)]
    assert parts.registry.waited == all_waits[: len(waits)]
    assert parts.receipt.waits == len(waits) - 1


async def test_engines_with_too_small_a_context_are_told_from_none():
    parts = Parts()
    parts.registry.answers = [[], [], [A]]  # the last question is about any engine
    with pytest.raises(NoEngines, match=r"^short of 8 and 8 tokens$"):
        await parts.choice._backends()
    assert parts.registry.asked[-1] == {}


@pytest.mark.parametrize(
    ("backends", "fallback"),
    [
        ([A], "collapsed"),
        ([engine("a", rests=True)], "collapsed"),
        ([A, B], None),
        ([engine("a", rests=True), engine("b", rests=True)], "breakers_open"),
    ],
)
async def test_an_attempt_says_what_it_lacks(backends, fallback):
    parts = Parts(choice=2)
    parts.registry.answers = [backends]
    attempt = await parts.choice._attempt(4)
    assert parts.receipt.fallbacks == ([fallback] if fallback else [])
    for name in ("collapsed", "breakers_open"):
        counted = parts.count(f'fallbacks_total{{fallback="{name}"}}')
        assert counted == (name == fallback), parts.metrics.render().decode()
    assert (attempt.request_id, attempt.backends, attempt.needs) == ("first", backends, NEEDS)
    assert (attempt.headers, attempt.alone) == ({"a": "b"}, len(backends) == 1)
    leg = attempt.begin_leg("start_generate", A, 0, 3)
    assert (leg.choice, leg.attempt, leg.request_id) == (2, 4, "first")


# Turns


@pytest.mark.parametrize(
    ("full", "waiters", "waits"),
    [
        (None, [], False),
        (None, ["another"], True),
        (NoCapacity("full"), [], True),
        (NoCapacity("full"), ["another"], True),
    ],
)
async def test_a_choice_waits_behind_others_and_for_room(full, waiters, waits):
    parts = Parts(queue_timeout_s=60.0)
    parts.waiters += waiters
    await parts.choice._wait_for_turn(full)
    assert parts.turns == ([(full, 1060.0)] if waits else [])
    assert parts.receipt.waits == waits


async def test_only_after_a_full_engine_the_next_attempt_waits():
    parts, numbers, turns, failed = Parts(), [], [], []
    failures = [NoCapacity("full"), Internal("broken"), None]
    full, broken, _ = failures
    parts.choice._writer.tokens = []
    parts.choice._execution.relocations = SimpleNamespace(movable=lambda _: nullcontext())

    async def turn(error: Any) -> None:
        turns.append(error)

    async def attempt(number: int) -> Any:
        numbers.append(number)
        return nullcontext()

    async def generate(attempt: Any, number: int) -> None:
        assert number == numbers[-1]
        if (error := failures.pop(0)) is not None:
            raise error

    parts.choice._wait_for_turn, parts.choice._attempt = turn, attempt
    parts.choice._generate = generate
    parts.choice._prepare_retry = lambda error, _: failed.append(error)
    await parts.choice.run()
    assert (numbers, turns, failed) == ([1, 2, 3], [None, full, None], [broken])


def test_a_choice_has_no_priority_unless_it_is_given_one():
    nothing: Any = None
    runner = ChoiceRunner(nothing, nothing, nothing, {}, 0.0)
    assert runner.priority == Request("x", [1], Sampling()).priority == 0


# What runs


@pytest.mark.parametrize(
    ("origin", "number", "forks", "ran"),
    [
        (None, 1, False, ["fork", "strategy"]),
        (None, 1, True, ["fork"]),
        (None, 2, True, ["strategy"]),
        (None, 3, True, ["strategy"]),
        ("origin", 1, True, ["relocated"]),
        ("origin", 2, False, ["relocated"]),
    ],
)
async def test_what_an_attempt_runs(monkeypatch, origin, number, forks, ran):
    parts, attempt, done = Parts(), SimpleNamespace(backends=[]), []

    class Run:
        def __init__(self, revision: Any, *args: Any) -> None:
            assert revision is parts.choice._runner.revision
            assert args == (attempt, parts.choice._request, parts.choice._writer)

        async def finish(self) -> None:
            done.append("strategy")

    async def relocated(*args: Any):
        assert (args[0], *args[2:]) == (attempt, parts.choice._request, "origin")
        done.append("relocated")
        yield Chunk(token_ids=[1])

    async def fork(given: Any) -> bool:
        assert given is attempt
        done.append("fork")
        return forks

    monkeypatch.setattr(module, "StrategyRun", Run)
    monkeypatch.setattr(module, "relocated", relocated)
    parts.choice._fork = fork
    parts.choice._origin = origin
    await parts.choice._generate(attempt, number)
    assert done == ran
    assert len(parts.written) == (ran == ["relocated"])


class Choices:
    """The choices of a prompt, whose first one was started at `origin`."""

    def __init__(self, origin: Any) -> None:
        self._origin = origin

    async def origin(self) -> Any:
        return self._origin


@pytest.mark.parametrize(
    ("choices", "choice", "forks"),
    [
        (None, 0, False),
        (None, 1, False),
        (Choices(SimpleNamespace(backend=A)), 0, False),
        (Choices(SimpleNamespace(backend=A)), 1, True),
        (Choices(None), 1, False),
    ],
)
async def test_only_further_choices_fork_and_only_what_was_started(
    monkeypatch, choices, choice, forks
):
    parts, closed = Parts(choice=choice, choices=choices), []

    async def chunks():
        try:
            yield Chunk(token_ids=[1])
            yield Chunk(token_ids=[2], text="x")  # the client reads it slowly
            yield Chunk(finish_reason="stop")
        finally:
            closed.append(True)

    class Engine:
        def __init__(self, attempt: Any, backend: Any) -> None:
            assert (attempt, backend) == ("attempt", A)

        def fork(self, request: Any, origin: Any) -> Any:
            assert (request, origin.backend) == (parts.choice._request, A)
            return chunks()

    monkeypatch.setattr(module, "Engine", Engine)
    assert await parts.choice._fork("attempt") is forks
    assert [chunk.token_ids for chunk in parts.written] == ([[1], [2], []] if forks else [])
    assert [chunk.text for chunk in parts.read] == (["x"] if forks else [])
    assert closed == ([True] if forks else [])


# After a failure


def attempt(origin: Any = None, mirrored: bool = False) -> Any:
    noted: list[str] = []
    return SimpleNamespace(
        blamed={B, A}, origin=origin, mirrored=mirrored, noted=noted, fallback=noted.append
    )


def test_a_failure_is_noted_with_the_engines_at_fault():
    parts = Parts(choice=2)
    parts.choice._failed = {engine("c")}
    parts.choice._prepare_retry(Internal("broken"), attempt())
    (retry,) = parts.receipt.retries
    assert 0 <= retry.pop("at_ms") < 1e6
    assert retry == {
        "choice": 2, "after_tokens": 2, "error": {"type": "internal", "message": "broken"},
        "engines": ["a", "b"],
    }  # fmt: skip
    assert {backend.id for backend in parts.choice._failed} == {"a", "b", "c"}
    assert parts.count('retries_total{reason="internal"}') == 1, parts.metrics.render().decode()
    assert parts.choice._tries == 2 and parts.choice._origin is None
    with pytest.raises(EngineUnreachable):
        for _ in range(3):
            parts.choice._prepare_retry(EngineUnreachable("gone"), attempt())
    assert len(parts.receipt.retries) == 2  # of three attempts


@pytest.mark.parametrize(
    ("error", "before", "origin", "tries", "after"),
    [
        (Internal("broken"), None, None, 2, None),
        (Moved("drained"), None, "new", 1, "new"),
        (Moved("drained"), None, None, 1, None),  # it had not begun
        (Moved("drained"), "old", "new", 1, "new"),
        (Moved("drained"), "old", None, 1, "old"),  # moved again, before it went on
        (Internal("broken"), "old", None, 1, None),  # the move has failed, and nothing else
    ],
)
def test_moves_are_no_tries_and_are_continued(error, before, origin, tries, after):
    parts = Parts()
    parts.choice._origin = before
    parts.choice._prepare_retry(error, attempt(origin))
    assert (parts.choice._tries, parts.choice._origin) == (tries, after)
    assert parts.claim.spent is (tries == 2)


@pytest.mark.parametrize(
    ("mirrored", "best", "origin", "recomputes"),
    [
        (True, None, None, True),
        (True, "replica", None, False),
        (True, None, "origin", False),
        (False, None, None, False),
    ],
)
def test_a_lost_replica_means_that_all_is_recomputed(mirrored, best, origin, recomputes):
    parts = Parts()
    parts.best = best
    failed = attempt(origin, mirrored)
    parts.choice._prepare_retry(Moved("drained") if origin else Internal("broken"), failed)
    assert failed.noted == (["recomputed"] if recomputes else [])
    assert parts.settled == mirrored  # of an attempt without replicas there is nothing to settle

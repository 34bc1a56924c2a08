"""The controller of `balanced`: against fixed ratios, on a model of engines in virtual time."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from engines_model import Job, Model, controlled, fixed, mean_time, poisson, shares

from router import Chunk
from strategies.controller import Controller

RATIOS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
SEEDS = range(3)
COUNT = 100
PAIR = {"prefill": "p", "decode": "d", "prefills": ["p"], "decodes": ["d"]}


def auto(*engines: int, **settings) -> Model:
    model: Model
    model = Model(controlled(lambda: model), *engines, **settings)
    return model


def run(model: Model, jobs: list[Job]) -> list[Job]:
    model.run(jobs)
    return jobs


@pytest.mark.parametrize(
    ("engines", "tokens", "output", "rate", "slower"),
    [
        ((1, 1), 384, 12, 0.6, ()),
        ((1, 1), 384, 12, 1.8, ()),  # more prefill than one engine can do
        ((1, 1), 26, 32, 7.0, ()),  # almost only decoding
        ((1, 1), 1000, 100, 0.6, ()),
        ((2, 1), 384, 12, 3.0, ()),
        ((1, 2), 384, 12, 1.8, ()),  # best if the decode engines do most of the prefill
        ((2, 2), 1000, 100, 1.5, ()),
        ((1, 1), 384, 12, 0.8, (2.0, 1.0)),  # a slow prefill engine
        ((1, 1), 384, 12, 1.0, (1.0, 2.0)),  # a slow decode engine
    ],
)
def test_auto_is_as_good_as_the_best_fixed_ratio(engines, tokens, output, rate, slower):
    def mean(make) -> float:
        times = []
        for seed in SEEDS:
            jobs = poisson(seed, COUNT, rate=rate, tokens=tokens, output=output)
            times.append(mean_time(run(make(), jobs)))
        return statistics.fmean(times)

    best = min(mean(lambda r=r: Model(fixed(r), *engines, slower=slower)) for r in RATIOS)
    assert mean(lambda: auto(*engines, slower=slower)) < 1.07 * best


def phase(start: float, count: int, every: float, tokens: int, output: int) -> list[Job]:
    return [Job(start + n * every, tokens, output) for n in range(count)]


def test_the_ratio_settles_after_a_step_and_does_not_oscillate():
    """Arrivals at a fixed pace: the load trebles and falls back, prompts shrink, outputs grow."""
    steps = [
        (40, 1.5, 384, 12), (40, 0.5, 384, 12), (40, 1.5, 384, 12), (40, 0.3, 26, 32),
        (40, 2.0, 1000, 12), (40, 2.0, 384, 200),
    ]  # fmt: skip
    jobs, at = [], 0.0
    settled = []
    for count, every, tokens, output in steps:
        jobs += phase(at, count, every, tokens, output)
        at += count * every
    run(auto(), jobs)
    for part in _parts(jobs, 40):
        late = list(shares(part[20:]))
        settled.append(statistics.fmean(late))
        assert max(late) - min(late) < 0.12, late
    assert settled[1] > 0.2  # at 2 requests a second one engine cannot prefill all
    assert settled[2] == pytest.approx(settled[0], abs=0.05)  # as in the first phase
    assert settled[3] < 0.05
    assert settled[4] > 0.3
    assert settled[5] < 0.05  # many streams run: their engine gets little prefill


def _parts(jobs: list[Job], size: int) -> list[list[Job]]:
    return [jobs[n : n + size] for n in range(0, len(jobs), size)]


def test_auto_is_as_good_as_the_best_ratio_of_each_phase():
    """Measurements of one workload do not spoil the division of the next."""
    phases = [(1.8, 384, 12), (7.0, 26, 32), (0.5, 1000, 100), (1.8, 384, 12)]
    jobs: list[Job] = []
    for seed, (rate, tokens, output) in enumerate(phases):
        start = jobs[-1].at + 20 if jobs else 0.0
        jobs += [
            Job(start + job.at, job.tokens, job.output)
            for job in poisson(seed, COUNT, rate=rate, tokens=tokens, output=output)
        ]
    run(auto(), jobs)
    for seed, (rate, tokens, output) in enumerate(phases):
        best = min(
            mean_time(
                run(
                    Model(fixed(ratio)),
                    poisson(seed, COUNT, rate=rate, tokens=tokens, output=output),
                )
            )
            for ratio in RATIOS
        )
        assert mean_time(jobs[seed * COUNT : (seed + 1) * COUNT]) < 1.1 * best


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def finish(controller: Controller, clock: Clock, tokens: int, *, ms: float, decode_s: float):
    """Run one request alone, with these times for prefill and decode."""
    with controller.divide(tokens, **PAIR) as division:
        clock.now += division.prefill_tokens * ms / 1e3
        if division.prefill_tokens:
            division.sent(division.prefill_tokens)
        clock.now += (tokens - division.prefill_tokens) * ms / 1e3
        division.received(Chunk([1]))
        clock.now += decode_s
        division.received(Chunk([1], finish_reason="length"))
    clock.now += 100.0
    return division.prefill_tokens


def near(tokens: int) -> Any:
    return pytest.approx(tokens, abs=6)


def test_the_division_follows_its_formula(clock):
    controller = Controller(clock)
    assert finish(controller, clock, 1000, ms=1, decode_s=0.2) == 900  # no measurement yet
    # Of a second of work, with 0.2 s of decoding: (T + 0.6 S) / 2; they come so rarely that ρ ≈ 0.
    assert finish(controller, clock, 1000, ms=1, decode_s=0.2) == near(400)
    with controller.divide(1000, **PAIR) as first:
        assert first.prefill_tokens == near(400)
        # B = 400, G = 600: (200 + 600 + 600 - 400) / 2
        with controller.divide(1000, **PAIR) as second:
            assert second.prefill_tokens == near(500)
        clock.now += 0.1  # 100 of them are done
        with controller.divide(1000, **PAIR) as third:
            assert third.prefill_tokens == near(550)
    clock.now += 100.0
    with controller.divide(1000, **PAIR) as last:  # earlier requests have left no load behind
        assert last.prefill_tokens == near(400)


@pytest.mark.parametrize(
    ("every_s", "share"),
    [
        (1.5, 367),  # ρ = 1/3: (2/3 T + 0.6 S) / 2
        (0.5, 360),  # ρ = 1, bounded by 0.4
    ],
)
def test_streams_count_less_where_the_engines_are_busy(clock, every_s, share):
    controller = Controller(clock)
    finish(controller, clock, 1000, ms=1, decode_s=0.2)
    for _ in range(60):
        clock.now += every_s
        with controller.divide(1000, **PAIR) as division:
            pass
    assert division.prefill_tokens == near(share)


def test_small_speed_differences_between_engines_are_ignored(clock):
    def share(slower: float) -> int:
        controller = Controller(clock)
        for _ in range(5):
            with controller.divide(1000, **PAIR) as division:
                clock.now += division.prefill_tokens / 1e3
                division.sent(division.prefill_tokens)
                clock.now += (1000 - division.prefill_tokens) * slower / 1e3
                division.received(Chunk([1]))
                clock.now += 0.2
                division.received(Chunk([1], finish_reason="length"))
            clock.now += 100.0
        return division.prefill_tokens

    assert share(1.0) == near(400)
    assert share(1.5) == near(380)  # T is fewer tokens, at 1.25 ms each, and nothing else changes
    assert share(2.0) > 500  # a different machine


@pytest.mark.parametrize(
    ("prefills", "decodes", "share"),
    [
        (["p", "q"], ["d"], 533),  # half as many queue here: (T + 0.6 S) / 1.5
        (["p"], ["d", "e"], 267),  # half as many streams there: half of (T + 0.6 S) / 1.5
        (["p", "d"], ["p", "d"], 300),  # each has both: streams are no reason. (0.6 S) / 2
    ],
)
def test_the_number_of_engines_of_each_role_counts(clock, prefills, decodes, share):
    controller = Controller(clock)
    finish(controller, clock, 1000, ms=1, decode_s=0.2)
    pools = {"prefills": prefills, "decodes": decodes}
    with controller.divide(1000, prefill="p", decode="d", **pools) as division:
        assert division.prefill_tokens == near(share)


def test_the_last_token_is_never_sent(clock):
    controller = Controller(clock)
    for tokens in (1, 2, 3):
        assert finish(controller, clock, tokens, ms=1, decode_s=1000) == tokens - 1


def test_a_single_engine_divides_nothing(clock):
    controller = Controller(clock)
    alone = {"prefill": "d", "decode": "d", "prefills": ["d"], "decodes": ["d"]}
    with controller.divide(100, **alone) as division:
        assert division.prefill_tokens == 0


def test_failed_requests_are_neither_queued_nor_measured(clock):
    controller = Controller(clock)
    finish(controller, clock, 1000, ms=1, decode_s=0.2)
    for point in range(3):
        with pytest.raises(RuntimeError), controller.divide(1000, **PAIR) as division:
            clock.now += 50.0
            if point > 0:
                division.sent(0)
            if point > 1:
                division.received(Chunk([1]))
            raise RuntimeError
        assert not any(engine.tokens for engine in controller._engines.values())
        clock.now += 50.0


def test_removed_engines_are_forgotten(clock):
    controller = Controller(clock)
    for n in range(100):
        pair = {"prefill": f"p{n}", "decode": "d", "prefills": [f"p{n}"], "decodes": ["d"]}
        with controller.divide(10, **pair):
            assert len(controller._engines) == 2

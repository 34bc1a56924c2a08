"""Random placements and events of long contexts: tokens and logits stay those of one engine."""

from __future__ import annotations

import random

import pytest
from engine_helpers import generation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from long_contexts import EPOCH, World, check_as_one_engine, prompt

from kvcache.borrowing import HomeOrder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

EVENTS = (
    "call back", "lose", "refuse", "close", "silent", "loud", "abort", "short", "home", "no sends",
)  # fmt: skip


def history(seed: int) -> None:
    """Run long and short generations; every few steps something happens at the creditors."""
    rng = random.Random(seed)
    made = World(
        rng.choice([24, 32, 40]),
        rng.randint(2, 4),
        400,
        budget=rng.choice([40, 100, 160]),
        loan_blocks=rng.randint(1, 3),
    )
    # So that blocks come home because it is cheaper, too, whatever is measured.
    made.engine.stepper.sweep_s = rng.choice([0.001, 0.05])
    try:
        long = [
            generation(n, prompt(rng.randint(300, 1000), seed + n), max_tokens=rng.randint(1, 12))
            for n in range(1, rng.randint(2, 4))
        ]
        jobs = [*long, generation(9, prompt(90, seed), max_tokens=20)]
        aborted = set()
        orders: list[HomeOrder] = []
        elsewhere = made.engine.cache.elsewhere
        assert elsewhere is not None
        closed = 0

        def between(step: int) -> None:
            nonlocal closed
            event = rng.choice(EVENTS) if rng.random() < 0.2 else ""
            one = rng.choice(made.lending)
            loans = made.source.loans_of(one.name)
            some = rng.sample(loans, rng.randint(0, len(loans)))
            if event == "call back" and some:
                made.source.call_back(one.name, some)
            elif event == "lose" and some:
                made.source.lose(one.name, some)
            elif event == "refuse" and some:
                made.source.lose(one.name, some, tell=False)
            elif event == "close" and closed < len(made.lending) - 1:
                closed += 1
                one.server.close()
            elif event == "home":
                orders.append(HomeOrder(one.name, EPOCH, rng.randint(1, 4), lambda: None))
                elsewhere.order_home(orders[-1])
                if rng.random() < 0.3:
                    elsewhere.cancel_order(rng.choice(orders))
            elif event == "no sends":
                made.source.refuse_sends = not made.source.refuse_sends
            elif event in ("silent", "loud"):
                made.source.silent = event == "silent"
                made.source.fill()
            elif event == "abort" and rng.random() < 0.2:
                job = rng.choice(jobs)
                aborted.add(job)
                made.engine.stepper.abort(job)
            elif event == "short":
                jobs.append(generation(100 + step, prompt(rng.randint(1, 80), step), max_tokens=5))
                made.engine.stepper.submit(jobs[-1])

        def idle() -> None:
            made.source.silent = False
            made.source.fill()

        made.engine.between, made.engine.idle = between, idle
        made.engine.run(jobs, aborted=aborted)
        assert made.engine.failures() == []
        for order in orders:
            elsewhere.cancel_order(order)
        made.check()
        check_as_one_engine(made.engine, [job for job in jobs if job not in aborted])
    finally:
        made.close()


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1 << 20))
def test_random_histories(seed: int):
    history(seed)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(60))
def test_further_histories(seed: int):
    history(7_000_000 + seed)

"""Experiments whose engines borrow pages by the router's ledger."""

from __future__ import annotations

from ast import literal_eval
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from experiments import engine, experiment, strategy_file

from engine.latency import FittedLatency
from router.simulation import Experiment, Outcome, SimulatedEngine, run_experiment
from router.simulation.fleet import VirtualFleet

pytestmark = pytest.mark.slow

STEP = FittedLatency(
    prefill=(4.0, 0.02, 1e-6), decode=(10.0, 2e-4, 0.05), large_decode=(10.0, 2e-4, 0.05)
)
POOL = 64  # pages of 16 tokens
LONG = 1500  # tokens


def some(**flags: object) -> list[SimulatedEngine]:
    return [
        engine(name, STEP, page_size=16, pool_pages=POOL, token_budget=256, max_model_len=4096,
               lease_ms=5000, **flags)
        for name in ("engine-0", "engine-1", "engine-2")
    ]  # fmt: skip


def run(fleet: list[SimulatedEngine], **fields: Any) -> tuple[Outcome, VirtualFleet]:
    watched: list[VirtualFleet] = []
    rate, requests = fields.pop("rate", 0.5), fields.pop("requests", 4)
    one: Experiment = experiment(
        "data_parallel", fleet, rate, requests,
        **{"input": LONG, "output": 32, "seed": 1, **fields},
    )  # fmt: skip
    one = replace(one, config=replace(one.config, queue_timeout_s=1e5))
    return run_experiment(one, observe=watched.append), watched[0]


def test_requests_longer_than_a_pool_complete_only_where_engines_borrow():
    refused, _ = run(some())
    assert not any(record.ok for record in refused.records)
    served, fleet = run(some(borrow=True, lend_share=1.0))
    assert all(record.ok for record in served.records)
    assert all(record.output_tokens == 32 for record in served.records)
    stats = [calls.engine.steps.stepper.stats for calls in fleet.engines.values()]
    assert sum(each.moved_blocks for each in stats) > 0


def test_the_same_seed_gives_the_same_outcome_to_the_bit():
    first, _ = run(some(borrow=True, lend_share=1.0))
    second, _ = run(some(borrow=True, lend_share=1.0))
    assert first == second


def test_requests_at_once_do_not_take_pages_from_each_other_over_and_over():
    """Six whose contexts fill a pool and more, on three engines: they run as far as they fit.

    All could begin on what the ledger says is free, since none of them holds a page yet.
    """
    fleet = [
        replace(one, config=replace(one.config, pool_pages=100))
        for one in some(borrow=True, lend_share=1.0)
    ]
    outcome, watched = run(fleet, rate=1000.0, requests=6, output=400)
    assert all(record.ok and record.output_tokens == 400 for record in outcome.records)
    steppers = [calls.engine.steps.stepper for calls in watched.engines.values()]
    computed = sum(each.stats.prompt_tokens for each in steppers)
    assert computed <= 1.1 * 6 * LONG  # else they compute again what they lose
    assert sum(each.stats.recomputed_tokens for each in steppers) == 0


def test_strategies_see_what_engines_would_lend(tmp_path: Path):
    """Virtual engines send heartbeats: `lendable` is as in a deployment."""
    lends = [replace(one, config=replace(one.config, lend_share=0.5)) for one in some()[:2]]
    found = tmp_path / "lendable"
    body = (
        f"    with open({str(found)!r}, 'w') as file:\n"
        "        file.write(repr({each.id: each.lendable for each in cluster.engines}))\n"
        "    async for chunk in engine.start_generate(request):\n"
        "        yield chunk\n"
    )
    one = experiment(strategy_file(tmp_path, body), [*lends, some()[2]], 1.0, 1, input=64, output=2)
    outcome = run_experiment(one)
    assert all(record.ok for record in outcome.records)
    assert literal_eval(found.read_text()) == {
        "engine-0": POOL // 2,
        "engine-1": POOL // 2,
        "engine-2": 0,
    }


@pytest.mark.parametrize("blocks", [0, 1])
def test_borrowing_ends_with_every_page_accounted_for(blocks):
    fleet = some(borrow=True, lend_share=1.0)
    one = experiment("data_parallel", fleet, 2.0, 6, input=LONG, output=64, seed=3)
    config = replace(one.config, queue_timeout_s=1e5, swap_blocks=blocks)
    outcome = run_experiment(replace(one, config=config))  # checks it
    assert all(record.ok for record in outcome.records)

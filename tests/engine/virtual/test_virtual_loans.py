"""Virtual engines that borrow pages of each other: tokens, times, and where every page is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from virtual_engines import LAYERS, PROFILE, STEP, TOKEN_BYTES, Engines, events, generate, tokens_of
from virtual_time import in_virtual_time

from engine.latency import StepWork
from engine.protocol import BadRequest, LendHome
from engine.virtual import output_tokens

BLOCK = 128
POOL = 8 * BLOCK  # tokens
PROMPT = [1 + i % 290 for i in range(12 * BLOCK)]
FLAGS = {
    "page_size": 16, "pool_pages": POOL // 16, "token_budget": 256, "max_model_len": 4096,
    "borrow": True, "lend_share": 1.0, "lease_ms": 4000,
}  # fmt: skip
GIVEN_BACK_S = 20.0


def fleet(*names: str, **flags: object) -> Engines:
    engines = Engines(*names, **{**FLAGS, **flags})
    for name in names:
        engines.introduce(name, *(other for other in names if other != name))
    return engines


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    while not holds():  # noqa: ASYNC110  nothing tells
        await asyncio.sleep(0.01)


async def at_rest(engines: Engines) -> None:
    """Check that every page is accounted for, and that nothing is lent any more."""
    await asyncio.sleep(GIVEN_BACK_S)
    await engines.rest()
    for engine in engines.all.values():
        if engine.alive:
            engine.cache.bookkeeping.lender.sweep()
            assert engine.cache.bookkeeping.lender.lent == 0
            assert engine.compute.owed_s >= 0


@in_virtual_time
async def test_a_context_longer_than_the_pool_is_served_on_borrowed_pages():
    engines = fleet("a", "b")
    stream = await engines["a"].start_generate(generate("r", PROMPT, 40))
    assert await tokens_of(stream) == output_tokens(PROMPT, 40)
    assert engines["a"].steps.stepper.stats.moved_blocks >= 5
    assert engines["b"].compute.lent_s > 0
    await at_rest(engines)


@in_virtual_time
async def test_without_borrowing_it_is_refused():
    engines = Engines("a", "b", **{**FLAGS, "borrow": False})
    with pytest.raises(BadRequest, match="pool holds"):
        await engines["a"].start_generate(generate("r", PROMPT, 40))


def test_the_same_run_gives_the_same_times_to_the_bit():
    histories = []

    @in_virtual_time
    async def run() -> None:
        engines = fleet("a", "b", "c")
        streams = [
            await engines[name].start_generate(generate(name, PROMPT[:tokens], 30))
            for name, tokens in (("a", len(PROMPT)), ("b", 200), ("c", 300))
        ]
        history = []
        for stream in streams:
            read = await events(stream)
            history.append((asyncio.get_running_loop().time(), [e.token_ids for e in read]))
        await at_rest(engines)
        histories.append(history)

    run()
    run()
    assert histories[0] == histories[1]


@in_virtual_time
async def test_a_step_takes_the_time_of_the_slower_of_local_and_remote_attention():
    engines = fleet("a", "b")
    a, rows = engines["a"], []
    a.steps.on_steps = lambda row, count: rows.append(row)
    await tokens_of(await a.start_generate(generate("r", PROMPT, 40)))
    row = next(row for row in reversed(rows) if row.remote)
    (remote,) = row.remote
    away = remote.work.context
    assert away and away % BLOCK == 0 and remote.rows == 1
    here = row.work.context - away
    none = STEP.seconds(StepWork(decodes=1))
    travel = 2 * LAYERS * PROFILE.put.layer_s + TOKEN_BYTES / PROFILE.put.bandwidth
    own = STEP.seconds(StepWork(decodes=1, context=here)) - none
    there = STEP.seconds(StepWork(decodes=1, context=away)) - none
    assert row.first_s == pytest.approx(none + max(own, travel + there))
    await at_rest(engines)


@in_virtual_time
async def test_a_creditors_own_steps_are_longer_by_what_it_computes_for_debtors():
    loop = asyncio.get_running_loop()
    engines = fleet("a", "b")
    debtor = asyncio.create_task(
        tokens_of(await engines["a"].start_generate(generate("r", PROMPT, 40)))
    )
    await until(lambda: engines["b"].compute.lent_s > 0)
    began, lent = loop.time(), engines["b"].compute.lent_s
    prompt = PROMPT[:64]
    await tokens_of(await engines["b"].start_generate(generate("s", prompt, 64)))
    took, lent = loop.time() - began, engines["b"].compute.lent_s - lent
    alone = STEP.seconds(StepWork(64, 64 * 64)) + sum(
        STEP.seconds(StepWork(0, 0, 1, 64 + i)) for i in range(63)
    )
    assert alone < took <= alone + lent + 1e-9
    assert await debtor == output_tokens(PROMPT, 40)
    await at_rest(engines)


@in_virtual_time
async def test_what_a_dead_creditor_held_is_computed_again():
    engines = fleet("a", "b", "c")
    task = asyncio.create_task(
        tokens_of(await engines["a"].start_generate(generate("r", PROMPT, 200)))
    )
    await until(lambda: engines["a"].steps.stepper.stats.generation_tokens > 20)
    lent = [name for name in "bc" if engines[name].cache.bookkeeping.lender.lent]
    engines[lent[0]].die()
    assert await task == output_tokens(PROMPT, 200)
    assert engines["a"].steps.stepper.stats.recomputed_tokens > 0
    await at_rest(engines)


@in_virtual_time
async def test_a_creditor_gets_its_pages_back_when_it_needs_them():
    engines = fleet("a", "b", "c")
    first = asyncio.create_task(
        tokens_of(await engines["a"].start_generate(generate("r", PROMPT, 300)))
    )
    await until(lambda: engines["a"].steps.stepper.stats.generation_tokens > 20)
    name = next(n for n in "bc" if engines[n].cache.bookkeeping.lender.lent)
    own = PROMPT[7 : 7 + POOL - 64]
    assert await tokens_of(
        await engines[name].start_generate(generate("s", own, 20))
    ) == output_tokens(own, 20)
    assert await first == output_tokens(PROMPT, 300)
    await at_rest(engines)


@in_virtual_time
async def test_blocks_come_home_by_order():
    engines = fleet("a", "b")
    a = engines["a"]
    task = asyncio.create_task(tokens_of(await a.start_generate(generate("r", PROMPT, 300))))
    await until(lambda: a.steps.stepper.stats.generation_tokens > 20)
    before = a.borrowing.use().pages if a.borrowing is not None else {}
    reply = await a.bring_home(
        LendHome(swap="x", creditor="b", creditor_epoch=1, blocks=1, freeze_ms=2000)
    )
    assert before and reply.blocks == 1
    assert a.cache.elsewhere is not None and a.cache.elsewhere.home["swap"] == 1
    assert await task == output_tokens(PROMPT, 300)
    await at_rest(engines)

"""Contexts that outgrow their engine: the tokens and logits are those of one large engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from engine_helpers import generation, tiny, tiny_layout
from hypothesis import given, settings
from hypothesis import strategies as st
from long_contexts import (
    Outcome,
    World,
    check_as_one_engine,
    check_outcomes,
    of_one_engine,
    prompt,
)

from engine.scheduling import Generation, long_generations
from kvcache.errors import NoCapacity
from kvcache.remote_attention import AttentionShape, Limits

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

POOL = 32  # pages: 512 tokens, 4 blocks
QUICK = 8  # placements


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(creditors: int, **options: Any) -> World:
        made.append(
            World(options.pop("pages", POOL), creditors, options.pop("lent", 400), **options)
        )
        return made[-1]

    yield make
    for one in made:
        try:
            one.check()
        finally:
            one.close()


@pytest.mark.parametrize(
    ("creditors", "length"), [(1, 768), (3, 1536), (6, 3048), (1, 500), (3, 513)]
)
def test_a_context_longer_than_the_pool(world: Callable[..., World], creditors: int, length: int):
    """IL12: 1.5, 3 and 6 times the pool, over 2, 4 and 7 engines; and prompts that just fit it."""
    made = world(creditors)
    long = generation(1, prompt(length), max_tokens=24)
    short = [generation(n, prompt(40 * n, n), max_tokens=8) for n in (2, 3)]
    made.engine.run([long, *short])
    made.engine.settle()
    check_as_one_engine(made.engine, [long, *short])
    assert made.engine.stepper.stats.moved_blocks >= (length + 24 - 16 * POOL) // 128
    assert made.engine.stepper.stats.failed_steps == 0


@cache
def outcome(times: float) -> Outcome:
    """What a context of so many times the pool gets on one large engine."""
    (found,) = of_one_engine([context(times)])
    return found


def context(times: float) -> Generation:
    return generation(1, prompt(int(times * 16 * POOL) - 24), max_tokens=24)


def check_placement(times: float, engines: int, choices: list[int], loan_blocks: int) -> None:
    made = World(POOL, engines - 1, 400, loan_blocks=loan_blocks, choices=choices)
    try:
        long = context(times)
        made.engine.run([long])
        assert long.target == times * 16 * POOL
        check_outcomes(made.engine, [long], [outcome(times)])
        stats = made.engine.stepper.stats
        assert stats.moved_blocks >= (times - 1) * 16 * POOL // 128
        assert stats.recovered_steps == stats.failed_steps == 0
        named = {number % (engines - 1) for number in choices}
        assert made.source.lenders <= {made.lending[number].name for number in named}
        made.check()
    finally:
        made.close()


# Times the pool, engines, the creditors in the order in which they are asked, blocks of a loan.
PLACEMENTS = (
    st.sampled_from([1.5, 3.0, 6.0]),
    st.sampled_from([2, 4, 7]),
    st.lists(st.integers(0, 5), min_size=1, max_size=24),
    st.integers(1, 4),
)


@settings(max_examples=QUICK, deadline=None)
@given(*PLACEMENTS)
def test_any_placement(times: float, engines: int, choices: list[int], loan_blocks: int):
    """IL12: contexts of 1.5, 3 and 6 times the pool, wherever their blocks lie."""
    check_placement(times, engines, choices, loan_blocks)


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(*PLACEMENTS)
def test_further_placements(times: float, engines: int, choices: list[int], loan_blocks: int):
    check_placement(times, engines, choices, loan_blocks)


def test_a_decode_that_outgrows_the_pool(world: Callable[..., World]):
    """It fits when it begins; later it moves its oldest blocks rather than be preempted."""
    made = world(2)
    long = generation(1, prompt(490), max_tokens=40)
    made.engine.run([long])
    check_as_one_engine(made.engine, [long])
    assert made.engine.scheduler.preemptions == 0


def growing() -> list[Generation]:
    """Four generations: each fits the pool, their prompts fit it together, their outputs do not."""
    return [generation(n, prompt(40 + 9 * n, n), max_tokens=300) for n in (1, 2, 3, 4)]


def test_generations_that_outgrow_the_pool_together_are_not_preempted(world: Callable[..., World]):
    """Their oldest blocks leave before a page is lacking, while creditors have room."""
    made = world(2)
    jobs = growing()
    made.engine.run(jobs)
    assert made.engine.scheduler.preemptions == 0
    stats = made.engine.stepper.stats
    assert stats.moved_blocks >= (sum(job.target for job in jobs) - 16 * POOL) // 128
    assert stats.lost_blocks == stats.recomputed_tokens == 0
    check_as_one_engine(made.engine, jobs)


@pytest.mark.parametrize("most", [0, 3])
def test_with_too_little_room_elsewhere_the_youngest_is_preempted_at_once(
    world: Callable[..., World], most: int
):
    """Nobody lends, or less than is needed: no decode waits for a block that nobody has lent."""
    made = world(2)
    made.source.most = most
    made.engine.stepper.sweep_s = 1e9  # patience does not end
    jobs, stalls, wanted = growing(), list[int](), set[int]()
    elsewhere = made.engine.cache.elsewhere
    assert elsewhere is not None

    def idle() -> None:
        if not any(elsewhere.moving(job.seq_id) for job in jobs):
            stalls.append(made.engine.stepper.stats.steps)

    made.engine.idle = idle
    made.engine.between = lambda _step: wanted.add(made.source.wanted)
    made.engine.run(jobs)
    assert made.engine.scheduler.preemptions > 0
    assert max(wanted) > 0
    assert (made.engine.stepper.stats.moved_blocks > 0) == (most > 0)
    assert not stalls
    check_as_one_engine(made.engine, jobs)


def test_loans_of_several_blocks_and_several_long_contexts(world: Callable[..., World]):
    """Three that outgrow the pool, beside short ones: all of them end."""
    made = world(3, loan_blocks=3)
    long = [generation(n, prompt(600 + 150 * n, n), max_tokens=10) for n in (1, 2, 3)]
    short = [generation(n, prompt(30 * n, n), max_tokens=30) for n in (4, 5, 6)]
    made.engine.run([*long, *short])
    check_as_one_engine(made.engine, [*long, *short])


def test_chunks_fit_what_creditors_answer(world: Callable[..., World]):
    """Blocks of two creditors in turn are many parts: a whole chunk's answer would be too large."""
    part = 4 * AttentionShape.of(tiny_layout(POOL), tiny().config.num_heads).part_floats
    made = world(2, limits=Limits(reply_bytes=128 * part))
    long = [generation(n, prompt(1100 + n, n), max_tokens=6) for n in (1, 2)]
    made.engine.run(long)
    check_as_one_engine(made.engine, long)
    assert made.engine.stepper.stats.recovered_steps == 0


@pytest.mark.parametrize(
    "limits",
    [{"spans": 2}, {"pages": 100}, {"loans": 12}, {"runs": 10}],
    ids=lambda limits: next(iter(limits)),
)
def test_decodes_that_exceed_what_a_creditor_answers_take_turns(
    world: Callable[..., World], limits: dict[str, int]
):
    """Each of them is within the limits, all together are not: none is refused."""
    made = world(2, pages=64, limits=Limits(**limits))
    jobs = [generation(n, prompt(1030 + n, n), max_tokens=12) for n in (1, 2, 3, 4)]
    made.engine.run(jobs)
    assert made.engine.stepper.stats.recovered_steps == 0
    assert made.engine.stepper.stats.lost_blocks == 0
    check_as_one_engine(made.engine, jobs)


def test_short_requests_pass_while_a_long_one_waits_for_blocks(world: Callable[..., World]):
    made = world(1)
    made.source.silent = True
    long = generation(1, prompt(900), max_tokens=5)
    made.engine.stepper.submit(long)
    short = [generation(n, prompt(50, n), max_tokens=5) for n in range(2, 8)]
    made.engine.run(short)
    assert made.engine.tokens(long) == []
    assert made.source.wanted > 0
    made.source.silent = False
    made.source.fill()
    made.engine.finish([long])
    check_as_one_engine(made.engine, [long, *short])


def test_no_other_long_one_begins_while_one_waits_for_blocks(world: Callable[..., World]):
    made = world(1)
    made.source.silent = True
    first, second = (generation(n, prompt(800, n), max_tokens=5) for n in (1, 2))
    for job in (first, second):
        made.engine.stepper.submit(job)
        for _ in range(10):
            made.engine.stepper.step()
    assert first.started
    assert not second.started
    made.source.silent = False
    made.source.fill()
    made.engine.finish([first, second])
    check_as_one_engine(made.engine, [first, second])


def test_without_any_block_it_fails_in_bounded_time(world: Callable[..., World]):
    made = world(1, lent=4)  # less than a block
    made.engine.stepper.sweep_s = 0.001
    long = generation(1, prompt(900), max_tokens=5)
    made.engine.run([long])
    (failure,) = made.engine.failures()
    assert isinstance(failure, NoCapacity)
    assert "lends" in str(failure)


def test_blocks_called_back_in_mid_decode(world: Callable[..., World]):
    """They come home, and their creditor has its pages again; no token is computed again."""
    made = world(3, loan_blocks=2)
    long = generation(1, prompt(1100), max_tokens=20)
    one, back = made.lending[0], list[int]()

    def between(step: int) -> None:
        if len(made.engine.tokens(long)) == 5 and not made.source.greedy:
            made.source.greedy.add(one.name)
            loans = made.source.loans_of(one.name)
            assert loans
            made.source.call_back(one.name, loans)
        elif made.source.greedy and one.lent == 0:
            back.append(len(made.engine.tokens(long)))
        else:
            time.sleep(0.01)  # the blocks come from other threads

    made.engine.between = between
    made.engine.run([long])
    check_as_one_engine(made.engine, [long])
    stats = made.engine.stepper.stats
    assert back and min(back) < 20
    assert stats.home_blocks["called_back"] > 0 == stats.lost_blocks


def test_blocks_called_back_that_their_creditor_does_not_send(world: Callable[..., World]):
    """They are computed again, for other creditors."""
    made = world(3, loan_blocks=2)
    made.source.refuse_sends = True
    long = generation(1, prompt(1100), max_tokens=20)
    one = made.lending[0]

    def between(step: int) -> None:
        if len(made.engine.tokens(long)) == 5 and not made.source.greedy:
            made.source.greedy.add(one.name)
            made.source.call_back(one.name, made.source.loans_of(one.name))

    made.engine.between = between
    made.engine.run([long])
    check_as_one_engine(made.engine, [long])
    stats = made.engine.stepper.stats
    assert one.lent == 0 and made.source.sends >= stats.lost_blocks > 0
    assert not stats.home_blocks and stats.recomputed_tokens == 128 * stats.lost_blocks


def test_blocks_come_home_when_the_pool_has_room(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
):
    """Others end in mid-prefill: the rest of it costs less if no query leaves the engine."""
    monkeypatch.setattr(long_generations, "QUIET", 2)
    made = world(1, pages=80, budget=32)
    made.engine.stepper.sweep_s = 0.0005
    long = generation(1, prompt(1050), max_tokens=4)
    manager = made.engine.cache.bookkeeping.pages
    held = manager.take(59)
    elsewhere = made.engine.cache.elsewhere
    assert elsewhere is not None

    def between(step: int) -> None:
        time.sleep(0.005)
        if held and long.started and elsewhere.away(long.seq_id) >= 2:
            manager.drop(held)
            held.clear()

    made.engine.between = between
    made.engine.run([long])
    assert not held
    assert elsewhere.home["cheaper"] >= 2
    assert made.source.sends == elsewhere.home["cheaper"]
    check_as_one_engine(made.engine, [long])


def test_a_long_context_leaves_an_eighth_of_the_pool_alone_and_half_of_it_to_others(
    world: Callable[..., World],
):
    made = world(1, pages=128)
    long = generation(1, prompt(2600), max_tokens=40)
    short = generation(2, prompt(700, 2), max_tokens=4)
    elsewhere = made.engine.cache.elsewhere
    assert elsewhere is not None
    local: list[int] = []

    def between(_step: int) -> None:
        time.sleep(0.005)  # blocks leave meanwhile
        produced = len(made.engine.tokens(long))
        if produced == 20 and not made.engine.tokens(short):
            local.append(elsewhere.local_pages(long.seq_id))
            made.engine.stepper.submit(short)
        if len(made.engine.tokens(short)) == 3:
            local.append(elsewhere.local_pages(long.seq_id))

    made.engine.between = between
    made.engine.stepper.submit(long)
    made.engine.finish([long, short])
    assert 128 - 16 - 8 <= local[0] <= 128 - 16
    assert local[1] <= 128 // 2
    check_as_one_engine(made.engine, [long, short])


@pytest.mark.parametrize("tokens", [-4, 6])
def test_a_creditor_that_is_lost(world: Callable[..., World], tokens: int):
    """In mid-prefill and in mid-decode: the step is computed again, nothing is emitted twice."""
    made = world(3)
    long = generation(1, prompt(1400), max_tokens=16)
    short = generation(2, prompt(60, 2), max_tokens=60)
    lost = made.lending[1]

    def between(step: int) -> None:
        due = step == -tokens if tokens < 0 else len(made.engine.tokens(long)) >= tokens
        if due and made.source.loans_of(lost.name) and lost.name not in made.source.failures:
            lost.server.close()

    made.engine.between = between
    made.engine.run([long, short])
    assert made.source.failures == [lost.name]
    stats = made.engine.stepper.stats
    assert stats.failed_steps == 0 < stats.lost_blocks
    assert stats.recovered_steps > 0
    assert stats.recomputed_tokens == 128 * stats.lost_blocks
    check_as_one_engine(made.engine, [long, short])


def test_loans_that_end_between_two_steps(world: Callable[..., World]):
    made = world(2)
    long = generation(1, prompt(1200), max_tokens=30)

    def between(step: int) -> None:
        if step % 7 == 0:
            name = made.lending[step % 2].name
            if loans := made.source.loans_of(name):
                made.source.lose(name, loans[:: 1 + step % 3])

    made.engine.between = between
    made.engine.run([long])
    check_as_one_engine(made.engine, [long])


def test_a_loan_that_only_the_creditor_knows_to_have_ended(world: Callable[..., World]):
    """It refuses the step; nobody else has told."""
    made = world(2)
    long = generation(1, prompt(1000), max_tokens=12)

    def between(step: int) -> None:
        if len(made.engine.tokens(long)) == 4 and not made.source.failures:
            name = made.lending[0].name
            made.source.lose(name, made.source.loans_of(name)[:1], tell=False)

    made.engine.between = between
    made.engine.run([long])
    assert made.engine.stepper.stats.recovered_steps > 0
    assert made.source.failures == [made.lending[0].name]
    assert not made.source.dead
    check_as_one_engine(made.engine, [long])


@pytest.mark.parametrize("after", [0, 3, 12])
def test_an_abort_gives_everything_back(world: Callable[..., World], after: int):
    made = world(2)
    long = generation(1, prompt(1300), max_tokens=40)
    other = generation(2, prompt(700, 2), max_tokens=8)

    def between(step: int) -> None:
        if step == after + 1:
            made.engine.stepper.abort(long)

    made.engine.between = between
    made.engine.stepper.submit(long)
    made.engine.run([other])
    made.engine.stepper.abort(long)
    made.engine.settle()
    assert not made.source.taken
    check_as_one_engine(made.engine, [other])


def test_choices_of_a_long_prompt(world: Callable[..., World]):
    """They cannot share blocks that are elsewhere, so each computes its own."""
    made = world(2)
    parent = generation(1, prompt(700), max_tokens=6)
    parent.forks = 1
    child = generation(2, prompt(700), max_tokens=6, seed=7, temperature=0.9)
    child.fork_of = parent.request_id
    made.engine.run([parent, child])
    check_as_one_engine(made.engine, [parent])
    assert len(made.engine.tokens(child)) == 6


def test_an_older_request_preempts_a_long_one_without_blocks(world: Callable[..., World]):
    made = world(1)
    made.source.most = 3
    first = generation(1, prompt(350), max_tokens=60)
    long = generation(2, prompt(560, 2), max_tokens=20)
    made.engine.run([first, long])
    check_as_one_engine(made.engine, [first, long])


def test_an_urgent_request_comes_first(world: Callable[..., World]):
    made = world(2)
    long = generation(1, prompt(1500), max_tokens=12, priority=1)
    urgent = generation(2, prompt(300, 2), max_tokens=10)
    made.engine.between = lambda step: made.engine.stepper.submit(urgent) if step == 9 else None
    made.engine.stepper.submit(long)
    made.engine.finish([long, urgent])
    check_as_one_engine(made.engine, [long, urgent])
    ended = [output.generation for output in made.engine.outputs if output.finish]
    assert ended == [urgent, long]

"""Parallel sampling: the prompt is computed once, and each choice draws its own tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from engine_helpers import at_rest, collect, generate, running, start

from engine.protocol import Release
from engine.scheduling import parallel_sampling
from engine.service.engine import MicroserveEngine

PROMPT = [(11 * n) % 250 for n in range(70)]  # four pages and six tokens
DRAWN = {"temperature": 1.0, "seed": 5, "max_tokens": 12}


@pytest.fixture(autouse=True)
def short_retention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the retention: these tests have no network delays."""
    monkeypatch.setattr(parallel_sampling, "RETAIN_S", 0.5)


@pytest.fixture
async def engine() -> AsyncIterator[MicroserveEngine]:
    async with running() as engine:
        yield engine


async def choices(
    engine: MicroserveEngine, prompt: list[int], count: int, **fields: object
) -> list[list[int]]:
    """Return the tokens of `count` choices that are requested together."""
    options = DRAWN | fields
    parent = await engine.start_generate(start(prompt, "c0", forks=count - 1, **options))
    streams = [parent] + [
        await engine.start_generate(start(prompt, f"c{n}", choice=n, fork_of="c0", **options))
        for n in range(1, count)
    ]
    events = await asyncio.gather(*(collect(stream) for stream in streams))
    return [[token for event in one for token in event.token_ids] for one in events]


@pytest.mark.parametrize("length", [2, 64, 65, 70])
@pytest.mark.parametrize("warm", [False, True])
async def test_choices_equal_single_runs_and_compute_the_prompt_once(length: int, warm: bool):
    prompt = PROMPT[:length]
    async with running() as alone:
        expected = [await generate(alone, prompt, choice=n, **DRAWN) for n in range(4)]
    async with running() as engine:
        if warm:
            await generate(engine, prompt)
        before = engine.loop.stats.prompt_tokens
        assert await choices(engine, prompt, 4) == expected
        computed = engine.loop.stats.prompt_tokens - before
        # All but the last token, whose logits are sampled; if warm, without the cached full pages.
        cached = (length - 1) // 16 * 16 if warm else 0
        assert computed == length - 1 - cached
    assert len({tuple(tokens) for tokens in expected}) == 4


async def test_a_late_choice_still_forks(engine: MicroserveEngine):
    async with running() as alone:
        expected = await generate(alone, PROMPT, choice=1, **DRAWN)
    await generate(engine, PROMPT, "c0", forks=1, **(DRAWN | {"max_tokens": 1}))
    before = engine.loop.stats.prompt_tokens
    assert await generate(engine, PROMPT, "c1", choice=1, fork_of="c0", **DRAWN) == expected
    assert engine.loop.stats.prompt_tokens == before


async def test_a_retained_prompt_without_forks_is_freed():
    async with running() as engine:
        await generate(engine, PROMPT, "c0", forks=3, max_tokens=2)
        assert engine.cache.page_use().active > 0
        await at_rest(engine)
        assert len(await generate(engine, PROMPT, "c1", fork_of="c0")) == 8


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 1, 3])
async def test_an_aborted_choice_does_not_affect_others(victim: int, after: int):
    async with running() as alone:
        expected = [await generate(alone, PROMPT, choice=n, **DRAWN) for n in range(3)]
    async with running(token_budget=16) as engine:
        options = [{"forks": 2}, {"choice": 1, "fork_of": "c0"}, {"choice": 2, "fork_of": "c0"}]
        streams = [
            await engine.start_generate(start(PROMPT, f"c{n}", **DRAWN, **options[n]))
            for n in range(3)
        ]

        async def read(number: int) -> list[int]:
            if number != victim:
                events = await collect(streams[number])
                return [token for event in events for token in event.token_ids]
            for _ in range(after):
                await asyncio.sleep(0.003)
            streams[number].close()
            return expected[number]

        assert await asyncio.gather(*(read(n) for n in range(3))) == expected
        engine.release(
            Release(request_id="c0")
        )  # routers send a release even if no call is left to end
        await at_rest(engine)


@pytest.mark.slow
async def test_preempted_choices_have_the_same_tokens():
    prompt = PROMPT[:40]
    async with running() as alone:
        expected = [
            await generate(alone, prompt, choice=n, **(DRAWN | {"max_tokens": 60}))
            for n in range(5)
        ]
    async with running(pages=16) as engine:
        assert await choices(engine, prompt, 5, max_tokens=60) == expected
        assert engine.preemptions > 0


async def test_a_full_batch_is_not_overfilled():
    async with running() as alone:
        expected = [await generate(alone, PROMPT, choice=n, **DRAWN) for n in range(6)]
    async with running(max_batch=2) as engine:
        widest = 0
        run = engine.loop.stepper._runner.run

        def counted(chunks):
            nonlocal widest
            widest = max(widest, len(chunks))
            return run(chunks)

        engine.loop.stepper._runner.run = counted
        assert await choices(engine, PROMPT, 6) == expected
        assert widest == 2


async def test_a_fork_of_another_prompt_computes_its_own(engine: MicroserveEngine):
    async with running() as alone:
        expected = await generate(alone, PROMPT[::-1])
    parent = await engine.start_generate(start(PROMPT, "c0", forks=1, max_tokens=40))
    assert await generate(engine, PROMPT[::-1], "c1", fork_of="c0") == expected
    parent.close()
    for name in ("c1", "nobody"):  # itself, and an unknown request
        assert await generate(engine, PROMPT[::-1], "c1", fork_of=name, forks=1) == expected


async def test_a_choice_resumes_after_its_earlier_output(engine: MicroserveEngine):
    async with running() as alone:
        expected = await generate(alone, PROMPT, choice=1, **DRAWN)
    await generate(engine, PROMPT, "c0", forks=1, **(DRAWN | {"max_tokens": 1}))
    rest = await generate(
        engine, PROMPT, "c1", choice=1, fork_of="c0", output=expected[:5], **DRAWN
    )
    assert expected[:5] + rest == expected

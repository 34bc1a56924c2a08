"""Contexts that outgrow their engine: the tokens and logits are those of one large engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from engine_helpers import generation
from long_contexts import Engine, World

from engine.scheduling.jobs import Generation

pytestmark = pytest.mark.slow

POOL = 32  # pages: 512 tokens, 4 blocks


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other's cores spin, and several engines compute here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(length)]


def same_as_one_engine(engine: Engine, jobs: Sequence[Generation]) -> None:
    """Check that these jobs have got the tokens and the logits of one engine with room for all."""
    whole = Engine(1200, 256, "whole")
    try:
        copies = [
            generation(n, job.tokens[: job.prompt_len], max_tokens=job.sampling.max_tokens)
            for n, job in enumerate(jobs, 1)
        ]
        whole.run(copies)
        for job, copy in zip(jobs, copies, strict=True):
            assert engine.tokens(job) == whole.tokens(copy)
            assert job.tokens == copy.tokens
            for found, expected in zip(engine.logits[job], whole.logits[copy], strict=True):
                assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    finally:
        whole.cache.close()


@pytest.mark.parametrize(
    ("creditors", "length"), [(1, 768), (3, 1536), (6, 3001), (1, 500), (3, 513)]
)
def test_a_context_longer_than_the_pool(world: Callable[..., World], creditors: int, length: int):
    """IL12: 1.5, 3 and 6 times the pool, over 2, 4 and 7 engines; and prompts that just fit it."""
    made = world(creditors)
    long = generation(1, prompt(length), max_tokens=24)
    short = [generation(n, prompt(40 * n, n), max_tokens=8) for n in (2, 3)]
    made.engine.run([long, *short])
    made.engine.settle()
    same_as_one_engine(made.engine, [long, *short])
    assert made.engine.stepper.stats.moved_blocks >= (length + 24 - 16 * POOL) // 128
    assert made.engine.stepper.stats.failed_steps == 0

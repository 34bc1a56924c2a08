"""Steps of a scheduler over a real cache; a step only marks its tokens as present."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

from engine.scheduling.jobs import Generation, Send
from engine.scheduling.scheduler import Scheduler
from kvcache.cache import KVCache
from kvcache.types import SeqId

PAGE = 16
Make = Callable[..., tuple[Scheduler, KVCache]]


def send(cache: KVCache, number: int, tokens: list[int]) -> Send:
    """Return a send as the service makes it, with a sequence that has all its pages."""
    seq_id = SeqId(number)
    cached = cache.add_sequence(seq_id, tokens)
    cache.grow(seq_id, len(tokens))
    put = cast(Any, None)  # the scheduler does not use it
    return Send(f"s{number}", seq_id, tokens, 0, cached, put, Future(), 0.0, True)


def step(scheduler: Scheduler, cache: KVCache) -> dict[str, int]:
    """Run one step: mark its tokens as present and append a token where one is sampled.

    Returns the number of tokens computed, by request.
    """
    plan = scheduler.plan()
    if not plan:
        return {}
    cache.begin_forward(
        [chunk.seq_id for _, chunk in plan], [len(chunk.tokens) for _, chunk in plan]
    )
    cache.end_forward()
    for job, chunk in plan:
        start = cache.length(job.seq_id) - len(chunk.tokens)
        assert list(chunk.tokens) == job.tokens[start : start + len(chunk.tokens)]
        assert chunk.sample == (
            isinstance(job, Generation) and start + len(chunk.tokens) == len(job.tokens)
        )
        if chunk.sample:
            job.tokens.append(100 + len(job.tokens))
        elif isinstance(job, Send) and cache.length(job.seq_id) == job.target:
            scheduler.remove(job)
            cache.remove_sequence(job.seq_id)
    return {job.request_id: len(chunk.tokens) for job, chunk in plan}


def finish(scheduler: Scheduler, cache: KVCache, job: Generation) -> None:
    scheduler.remove(job)
    if job.started:
        cache.remove_sequence(job.seq_id)

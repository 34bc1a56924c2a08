"""The runner of the model `mock`: fixed tokens at a fixed rate, without arithmetic.

Everything around it is the real engine: scheduler, step loop, leases, pages and puts. Puts send
whatever bytes the pages hold.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.latency import StepLatency, StepWork
from engine.models.loading.mock import mock_tokens
from engine.protocol import BadRequest
from engine.sampling.sampled import Sampled
from engine.scheduling import Chunk, Generation
from kvcache.cache import KVCache

__all__ = ["MockRunner", "mock_sample"]

_TOKENS = mock_tokens()


class MockRunner:
    """Takes the place of a `ModelRunner`, and sleeps for the time of a step.

    `latency` tells how long steps take, by their prompt tokens and decodes; it is not told of
    contexts. The engine's own overhead counts towards it, so a busy engine keeps its rate.
    """

    def __init__(self, cache: KVCache, latency: StepLatency) -> None:
        self._cache = cache
        self._latency = latency
        self._shortest_s = latency.seconds(StepWork(decodes=1))
        self._due = 0.0  # when the latest step should have ended; monotonic seconds

    def run(self, chunks: Sequence[Chunk]) -> None:
        """Count the chunks' tokens as computed, and put those that a send wants."""
        cache = self._cache
        cache.begin_forward(
            [chunk.seq_id for chunk in chunks], [len(chunk.tokens) for chunk in chunks]
        )
        for layer in range(cache.layout.layers):
            cache.put(layer)
        decodes = sum(chunk.sample and len(chunk.tokens) == 1 for chunk in chunks)
        prompt_tokens = sum(len(chunk.tokens) for chunk in chunks) - decodes
        self._sleep(self._latency.seconds(StepWork(prompt_tokens, decodes=decodes)))
        cache.end_forward()

    def _sleep(self, took: float) -> None:
        if not took:
            return
        now = time.monotonic()
        # A delay of less than a step is made up for. After an idle time, the rate starts afresh.
        self._due = (self._due if now - self._due < self._shortest_s else now) + took
        if self._due > now:
            time.sleep(self._due - now)


def mock_sample(logits: None, generations: Sequence[Generation]) -> list[Sampled]:
    """Return the fixed token of each generation's position, with probability 1."""
    sampled = []
    for generation in generations:
        token = _TOKENS[len(generation.tokens) % len(_TOKENS)]
        logprobs = generation.sampling.logprobs
        if generation.sampling.structure is not None:
            param = generation.sampling.structure.param
            failure = BadRequest("the mock model cannot follow a grammar", param=param)
            sampled.append(Sampled(token, failure=failure))
        elif logprobs is None:
            sampled.append(Sampled(token))
        else:
            sampled.append(Sampled(token, 0.0, [(token, 0.0)] if logprobs else []))
    return sampled

"""The runner of the model `mock`: fixed tokens at a fixed pace, and no arithmetic.

Everything around it is the real engine: scheduler, step loop, leases, pages and puts. What is put
are the bytes that the pages happen to hold.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from engine.execution.model_runner import Chunk
from engine.models.loading.mock import mock_tokens
from engine.protocol import BadRequest
from engine.scheduling.jobs import Generation, Sampled
from kvcache.cache import KVCache

__all__ = ["MockRunner", "mock_sample"]

NO_LOGITS = torch.empty(0)
_TOKENS = mock_tokens()


class MockRunner:
    """Stands where a `ModelRunner` does; the time of a step is slept.

    A step takes `step_ms`, and `1 / prefill_tokens_per_ms` more for each token of a prompt (0:
    nothing). Its own overhead is part of that, so that a busy engine keeps its pace.
    """

    def __init__(self, cache: KVCache, *, step_ms: float, prefill_tokens_per_ms: float) -> None:
        self._cache = cache
        self._step_s = step_ms / 1e3
        self._token_s = 1e-3 / prefill_tokens_per_ms if prefill_tokens_per_ms else 0.0
        self._due = 0.0  # when the last step should have ended (monotonic)

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Let the chunks' tokens count as computed, and put what is marked of them."""
        cache = self._cache
        cache.begin_forward(
            [chunk.seq_id for chunk in chunks], [len(chunk.tokens) for chunk in chunks]
        )
        for layer in range(cache.layout.layers):
            cache.put(layer)
        self._sleep(sum(len(chunk.tokens) - chunk.sample for chunk in chunks))
        cache.end_forward()
        return NO_LOGITS

    def _sleep(self, prompt_tokens: int) -> None:
        took = self._step_s + prompt_tokens * self._token_s
        if not took:
            return
        now = time.monotonic()
        # A little late is caught up with; after an idle time the pace begins anew.
        self._due = (self._due if now - self._due < self._step_s else now) + took
        if self._due > now:
            time.sleep(self._due - now)


def mock_sample(logits: torch.Tensor, generations: Sequence[Generation]) -> list[Sampled]:
    """The token of each generation's position, whatever `logits` and its sampling are; certain."""
    drawn = []
    for generation in generations:
        token = _TOKENS[len(generation.tokens) % len(_TOKENS)]
        logprobs = generation.sampling.logprobs
        if generation.sampling.structure is not None:
            param = generation.sampling.structure.param
            failure = BadRequest("mock says what it says, and follows no grammar", param=param)
            drawn.append(Sampled(token, failure=failure))
        elif logprobs is None:
            drawn.append(Sampled(token))
        else:
            drawn.append(Sampled(token, 0.0, [(token, 0.0)] if logprobs else []))
    return drawn

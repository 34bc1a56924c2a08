"""The model runner: computes the chunks of a step as one forward pass over the paged cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from engine.models import LoadedModel
from engine.protocol import Internal
from engine.scheduling import Chunk
from kvcache.cache import KVCache

__all__ = ["ModelRunner", "bucket", "stable_row_multiple"]

log = logging.getLogger(__name__)

CANDIDATES = (4, 8, 16, 32, 64)


class ModelRunner:
    """Runs chunks of many sequences as one batch over the paged cache.

    Row counts are padded so that the bits of a row do not depend on the batch (float32 on a CPU)
    and so that the number of distinct shapes stays small.
    """

    def __init__(self, model: LoadedModel, cache: KVCache) -> None:
        if model.transformer is None:
            raise Internal(f"{model.name} has no weights to run")
        self._model = model.transformer
        self._cache = cache
        self._device = cache.store.device
        self._padded = bucket
        if cache.layout.dtype == torch.float32 and self._device.type == "cpu":
            multiple = stable_row_multiple(model.config.hidden_size)
            self._padded = lambda rows: -(-rows // multiple) * multiple

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute the chunks' KV; return `[chunks with sample, vocab]` float32 logits.

        If it raises, no token of the step counts as present.
        """
        self._cache.begin_forward(
            [chunk.seq_id for chunk in chunks], [len(chunk.tokens) for chunk in chunks]
        )
        try:
            tokens: list[int] = []
            positions: list[int] = []
            last: list[int] = []
            for chunk in chunks:
                start = self._cache.length(chunk.seq_id)
                tokens += chunk.tokens
                positions += range(start, start + len(chunk.tokens))
                if chunk.sample:
                    last.append(len(tokens) - 1)
            padding = [0] * (self._padded(len(tokens)) - len(tokens))
            hidden = self._model(
                torch.tensor(tokens + padding, device=self._device),
                torch.tensor(positions + padding, device=self._device),
                self._cache,
            )
            wanted = last + [0] * (self._padded(len(last)) - len(last))
            logits: torch.Tensor = self._model.logits(hidden[wanted])[: len(last)]
        except BaseException:
            self._cache.abort_forward()
            raise
        self._cache.end_forward()
        return logits


def bucket(rows: int) -> int:
    """Round `rows` up to one of a few row counts.

    oneDNN keeps a kernel for every row count it has multiplied: hundreds of MiB if prompts come in
    chunks of arbitrary length.
    """
    step = 1 if rows <= 8 else 4 if rows <= 32 else 16 if rows <= 128 else 64
    return -(-rows // step) * step


def stable_row_multiple(hidden: int) -> int:
    """Return the smallest count whose multiples of rows give the same bits per row on this CPU.

    Found by trial: products with few rows or odd row counts use other CPU kernels, which sum in
    another order. Logs a warning and returns the largest candidate if no candidate is stable.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((3 * hidden, hidden), generator=generator)
    rows = torch.randn((256, hidden), generator=generator)
    whole = torch.nn.functional.linear(rows, weight)
    for multiple in CANDIDATES:
        counts = [multiple * n for n in (1, 2, 3, 4, 5, 7, 8, 16) if multiple * n <= len(rows)]
        if all(
            torch.equal(torch.nn.functional.linear(rows[:n], weight), whole[:n]) for n in counts
        ):
            return multiple
    log.warning("float32 products are not bit-stable on this CPU: near ties may give other tokens")
    return CANDIDATES[-1]

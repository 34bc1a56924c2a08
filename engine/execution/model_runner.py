"""The model runner: computes the chunks of a step as one forward pass over the paged cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from engine.latency import padded_rows
from engine.models import Linear, LoadedModel
from engine.protocol import Internal
from engine.scheduling import Chunk
from kvcache.cache import KVCache
from kvcache.sequences import StepDescription

__all__ = [
    "ModelRunner",
    "StepRows",
    "row_multiple",
    "stable_row_multiple",
    "step_rows",
]

log = logging.getLogger(__name__)

CANDIDATES = (4, 8, 16, 32, 64)
ROWS = 256  # of the products that are tried
LARGE = 1 << 24  # elements of a weight with which as few rows are tried as decodes have
FEW_ROWS = 64


class StepRows(NamedTuple):
    """The rows of a step: one for each token of its chunks, and then padding."""

    tokens: list[int]
    positions: list[int]
    wanted: list[int]  # rows whose logits are wanted, and then padding
    logits: int  # how many of them are no padding


def step_rows(chunks: Sequence[Chunk], step: StepDescription, multiple: int) -> StepRows:
    """Return the rows of a step of these chunks, padded as `row_multiple` has it."""
    tokens: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    for chunk, span in zip(chunks, step.spans, strict=True):
        tokens += chunk.tokens
        positions += range(span.start, span.start + span.count)
        if chunk.sample:
            wanted.append(len(tokens) - 1)
    logits = len(wanted)
    padding = [0] * (padded_rows(len(tokens), multiple) - len(tokens))
    wanted += [0] * (padded_rows(logits, multiple) - logits)
    return StepRows(tokens + padding, positions + padding, wanted, logits)


class ModelRunner:
    """Runs chunks of many sequences as one batch over the paged cache.

    Row counts are padded so that the bits of a row do not depend on the batch (float32 on a CPU),
    and so that the number of distinct shapes stays small where a library keeps a kernel for each.
    """

    def __init__(self, model: LoadedModel, cache: KVCache) -> None:
        if model.transformer is None:
            raise Internal(f"{model.name} has no weights to run")
        self._model = model.transformer
        self._cache = cache
        self._device = cache.store.device
        self.row_multiple = row_multiple(self._model, cache.layout.dtype, self._device)

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute the chunks' KV; return `[chunks with sample, vocab]` float32 logits.

        If it raises, no token of the step counts as present.
        """
        step = self._cache.begin_forward(
            [chunk.seq_id for chunk in chunks], [len(chunk.tokens) for chunk in chunks]
        )
        try:
            rows = step_rows(chunks, step, self.row_multiple)
            hidden = self._model(
                torch.tensor(rows.tokens, device=self._device),
                torch.tensor(rows.positions, device=self._device),
                self._cache,
            )
            logits: torch.Tensor = self._model.logits(hidden[rows.wanted])[: rows.logits]
        except BaseException:
            self._cache.abort_forward()
            raise
        self._cache.end_forward()
        return logits


def row_multiple(model: nn.Module, dtype: torch.dtype, device: torch.device) -> int:
    """Return a count of rows whose multiples a step has to have.

    0: any count is fine; 1: it has to be one of a few (`engine.latency.padded_rows`), since oneDNN
    keeps a kernel for every count that it has multiplied: hundreds of MiB if prompts come in chunks
    of arbitrary length.
    """
    if device.type != "cpu":
        return 1
    if dtype == torch.float32:
        return stable_row_multiple(model)
    layers = (layer for layer in model.modules() if isinstance(layer, Linear))
    return int(any(layer.keeps_kernels for layer in layers))


def stable_row_multiple(model: nn.Module) -> int:
    """Return the smallest count whose multiples of rows give the same bits per row on this CPU.

    Found by trial, with one weight of each shape in `model`: products with few rows or odd row
    counts may use other CPU kernels, which sum in another order. Logs a warning and returns the
    largest candidate if no candidate is stable.
    """
    layers = {
        layer.shape: layer
        for layer in model.modules()
        if isinstance(layer, Linear) and layer.weight.dtype == torch.float32
    }
    multiple = CANDIDATES[0]
    for shape, layer in layers.items():
        multiple = _stable_multiple(layer, multiple)
        if not multiple:
            log.warning(
                "float32 products with a weight %s are not bit-stable on this CPU: near ties may "
                "give other tokens", shape,
            )  # fmt: skip
            return CANDIDATES[-1]
    return multiple


@torch.inference_mode()
def _stable_multiple(layer: Linear, least: int) -> int:
    """Return the smallest candidate from `least` on that is stable for a layer; 0: none."""
    outputs, inputs = layer.shape
    count = FEW_ROWS if outputs * inputs > LARGE else ROWS
    rows = torch.randn((count, inputs), generator=torch.Generator().manual_seed(0))
    whole = layer(rows)
    for multiple in CANDIDATES:
        if multiple >= least and all(
            torch.equal(layer(rows[:n]), whole[:n]) and torch.equal(layer(rows[-n:]), whole[-n:])
            for n in (multiple * times for times in (1, 2, 3, 4, 5, 7, 8, 16))
            if n <= count
        ):
            return multiple
    return 0

"""The model runner: computes the chunks of a step as one forward pass over the paged cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from engine.execution.forward.decode_graphs import DecodeGraphs
from engine.execution.forward.segment_graphs import SegmentGraphs
from engine.execution.forward.step_rows import StepRows, step_rows
from engine.execution.runner import DeviceLost
from engine.models import Linear, LoadedModel
from engine.protocol import Internal
from engine.scheduling import Chunk
from kvcache.cache import KVCache

__all__ = ["ModelRunner", "row_multiple", "stable_row_multiple"]

log = logging.getLogger(__name__)

CANDIDATES = (4, 8, 16, 32, 64)
ROWS = 256  # of the products that are tried
LARGE = 1 << 24  # elements of a weight with which as few rows are tried as decodes have
FEW_ROWS = 64


class ModelRunner:
    """Runs chunks of many sequences as one batch over the paged cache.

    Row counts are padded so that the bits of a row do not depend on the batch (float32 on a CPU),
    and so that the number of distinct shapes stays small where a library keeps a kernel for each.
    On a GPU, steps are replayed from CUDA graphs where attention has plans for them.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        *,
        graph_rows: int = 0,
        context: int = 0,
        prompt_rows: int = 0,
    ) -> None:
        """Capture CUDA graphs for up to `graph_rows` decodes of up to `context` tokens.

        Capture others for all other steps of up to `prompt_rows` rows.
        """
        if model.transformer is None:
            raise Internal(f"{model.name} has no weights to run")
        self._model = model.transformer
        self._cache = cache
        self._device = cache.store.device
        self.row_multiple = row_multiple(self._model, cache.layout.dtype, self._device)
        self._graphs: DecodeGraphs | None = None
        if graph_rows and self._device.type == "cuda":
            self._graphs = DecodeGraphs.make(self._model, cache, graph_rows, context)
        self._segments: SegmentGraphs | None = None
        if prompt_rows and self._graphs is not None:
            self._segments = SegmentGraphs(self._model, cache, prompt_rows)

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
            logits = self._graphs.run(rows, step) if self._graphs is not None else None
            if logits is None:
                logits = self._model.logits(self._hidden(rows)[rows.wanted])[: rows.logits]
            self._wait()
        except BaseException:
            try:
                self._wait()  # before the pages of the step may be used for something else
            except RuntimeError as error:
                raise DeviceLost(f"the GPU computes nothing any more: {error}") from error
            finally:
                self._cache.abort_forward()
            raise
        self._cache.end_forward()
        return logits

    def _hidden(self, rows: StepRows) -> torch.Tensor:
        """Return the hidden states of a step's rows, `[rows, hidden]`."""
        hidden = self._segments.run(rows) if self._segments is not None else None
        if hidden is None:
            hidden = self._model(
                torch.tensor(rows.tokens, device=self._device),
                torch.tensor(rows.positions, device=self._device),
                self._cache,
            )
        return hidden

    def _wait(self) -> None:
        """Wait until the device has computed what was started.

        So a step has the duration that was measured, and no page of an aborted sequence is still
        written when it is reused: peers write pages outside of this device's streams.
        """
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


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

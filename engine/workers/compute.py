"""A worker's part of each step."""

from __future__ import annotations

import mmap

import numpy as np
import torch

from engine.execution.model_runner import stable_row_multiple
from engine.models import LoadedModel, ModelConfig, Part, load_model, split_model
from engine.protocol import Internal
from engine.workers.settings import WorkerSettings
from engine.workers.shared_sum import SharedSum
from engine.workers.stage_link import StageLink
from engine.workers.wire import Array
from kvcache.memory import KVLayout
from kvcache.page_store import TorchPageStore
from kvcache.sequences import PageCopy, Span, StepDescription
from kvcache.transport import Transport
from kvcache.types import PageId, TokenPos

__all__ = ["PartWorker"]


class PartWorker:
    """Weights, pages and computation of one worker."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Load the part's weights. Raises `ModelError`, and as `StageLink`."""
        self._settings = settings
        dtype = getattr(torch, settings.dtype)
        self._link = StageLink(settings) if settings.pp > 1 else None
        self._sum: SharedSum | None = None
        if settings.tp > 1:
            number = settings.rank % settings.tp
            self._sum = SharedSum(settings.sum_fd, settings.tp, number, settings.hidden, dtype)
        self.model: LoadedModel = load_model(
            settings.model,
            dtype=dtype,
            device=torch.device(settings.device),
            quantization=settings.quantization,  # type: ignore[arg-type]
            part_of=self._part,
            sum_=self._sum,
        )
        if self.model.transformer is None:
            raise Internal(f"{settings.model} has no weights to split")
        self._transformer = self.model.transformer
        self._dtype = dtype
        self._store: TorchPageStore | None = None
        vocab = self.model.config.vocab_size
        size = settings.logits_rows * vocab * 4
        memory = mmap.mmap(settings.logits_fd, size)
        logits = torch.frombuffer(memory, dtype=torch.float32).view(-1, vocab)
        own = self._transformer.part.vocab
        self._logits = logits[:, own.start : own.stop]

    def _part(self, config: ModelConfig) -> Part:
        settings = self._settings
        return split_model(config, tp=settings.tp, pp=settings.pp)[settings.rank]

    @property
    def row_multiple(self) -> int:
        """The count whose multiples of rows give the same bits per row; 1: it does not matter."""
        if self._dtype != torch.float32:
            return 1
        return stable_row_multiple(self._transformer)

    @property
    def weight_bytes(self) -> int:
        """Bytes of this part's weights."""
        weights = self._transformer.parameters()  # each once, also those of tied embeddings
        return sum(weight.numel() * weight.element_size() for weight in weights)

    def allocate(self, pages: int, transport: Transport) -> None:
        """Allocate the part's pages, scratch page included."""
        config = self.model.config
        layout = KVLayout(
            config.num_layers,
            pages,
            self._settings.page_size,
            config.num_kv_heads,
            config.head_dim,
            self._dtype,
            self._transformer.part.shard,
        )
        self._store = TorchPageStore.on(transport, layout, query_heads=config.num_heads)

    @property
    def store(self) -> TorchPageStore:
        """The part's pages. Raises `Internal` before there are any."""
        if self._store is None:
            raise Internal("no pages are allocated")
        return self._store

    def copy(self, copies: Array) -> None:
        """Copy parts of pages: rows of source, target and tokens."""
        self.store.copy(page_copies(copies))

    @torch.inference_mode()
    def step(self, arrays: list[Array]) -> None:
        """Compute a step. Raises what torch raises; no token of the step counts as present then."""
        begin, tokens, positions, wanted, spans, lengths, tables, copies = arrays
        pages = np.split(tables.astype(np.int32), np.cumsum(lengths)[:-1])
        store, transformer, part = self.store, self._transformer, self._transformer.part
        store.begin(
            StepDescription(
                (),
                tuple(
                    Span(int(row), TokenPos(int(start)), int(count), own)
                    for (row, start, count), own in zip(spans.reshape(-1, 3), pages, strict=True)
                ),
                copies=page_copies(copies),
            )
        )
        try:
            if self._link is None or part.first:
                hidden = transformer.embedded(torch.from_numpy(tokens.copy()))
            else:
                hidden = self._link.take_over(len(tokens), self._settings.hidden, self._dtype)
            hidden = transformer.run(hidden, torch.from_numpy(positions.copy()), store)
            if self._link is None or part.last:
                rows = torch.from_numpy(wanted.copy())
                own = self._logits[int(begin[0]) : int(begin[0]) + len(rows)]
                own.copy_(transformer.logits(hidden[rows]))
            else:
                self._link.pass_on(hidden)
        except BaseException:
            store.abort()
            raise
        store.end()

    def check(self) -> None:
        """Raise `Internal` if the scratch page has been written."""
        self.store.check()

    def close(self) -> None:
        """Release the pages."""
        if self._store is not None:
            self._store.close()


def page_copies(copies: Array) -> tuple[PageCopy, ...]:
    """Return the copies of rows of source, target and tokens."""
    return tuple(
        PageCopy(PageId(int(source)), PageId(int(target)), int(tokens))
        for source, target, tokens in copies.reshape(-1, 3)
    )

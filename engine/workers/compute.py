"""A worker's part of each step."""

from __future__ import annotations

import mmap
from dataclasses import replace

import numpy as np
import torch

from engine.execution.model_runner import row_multiple
from engine.models import LoadedModel, ModelConfig, Part, load_model, split_model
from engine.protocol import Internal
from engine.workers.settings import WorkerSettings
from engine.workers.shared_sum import SharedSum
from engine.workers.stage_link import StageLink
from engine.workers.wire import Array
from kvcache.memory import KVLayout, PartRegion, Prefaulter, SplitLayout
from kvcache.page_store import TorchPageStore
from kvcache.sequences import Span, StepDescription
from kvcache.types import TokenPos

__all__ = ["PartWorker"]


class PartWorker:
    """Weights, pages and computation of one worker."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Load the part's weights. Raises `ModelError`, and as `StageLink`."""
        self._settings = settings
        self._prefaulter = Prefaulter()
        dtype = getattr(torch, settings.dtype)
        self._link: StageLink | None = None
        self._meet(settings.rendezvous)
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
        """As of `engine.execution.model_runner.row_multiple`."""
        return row_multiple(self._transformer, self._dtype, torch.device("cpu"))

    @property
    def weight_bytes(self) -> int:
        """Bytes of this part's weights."""
        weights = self._transformer.parameters()  # each once, also those of tied embeddings
        return sum(weight.numel() * weight.element_size() for weight in weights)

    def map_pages(self, pages: int, lead: int, fd: int, at: int) -> None:
        """Map the part's pages, scratch page included.

        The pool begins at byte `at` behind descriptor `fd` of process `lead`.
        """
        config, settings = self.model.config, self._settings
        whole = KVLayout(
            config.num_layers,
            pages,
            settings.page_size,
            config.num_kv_heads,
            config.head_dim,
            self._dtype,
        )
        parts = split_model(config, tp=settings.tp, pp=settings.pp)
        split = SplitLayout(whole, tuple(part.shard for part in parts))
        region = PartRegion(lead, fd, at, split, settings.rank)
        self._prefaulter.add(region)
        self._store = TorchPageStore(region, query_heads=config.num_heads)

    def rejoin(self, rendezvous: str) -> None:
        """Meet the other workers again, one of which is new. Raises as `StageLink`."""
        self._leave()
        if self._sum is not None:
            self._sum.reset()
        self._meet(rendezvous)

    def _meet(self, rendezvous: str) -> None:
        if self._settings.pp > 1:
            self._link = StageLink(replace(self._settings, rendezvous=rendezvous))

    def _leave(self) -> None:
        """Close the connections to the other stages, so that none of them waits for this one."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    @property
    def store(self) -> TorchPageStore:
        """The part's pages. Raises `Internal` before there are any."""
        if self._store is None:
            raise Internal("no pages are allocated")
        return self._store

    @torch.inference_mode()
    def step(self, arrays: list[Array]) -> None:
        """Compute a step. No token of it counts as present if it fails.

        Raises what torch raises. It has left the other stages then: `rejoin` has to follow.
        """
        begin, tokens, positions, wanted, spans, lengths, tables = arrays
        pages = np.split(tables.astype(np.int32), np.cumsum(lengths)[:-1])
        store, transformer, part = self.store, self._transformer, self._transformer.part
        store.begin(
            StepDescription(
                (),
                tuple(
                    Span(int(row), TokenPos(int(start)), int(count), own)
                    for (row, start, count), own in zip(spans.reshape(-1, 3), pages, strict=True)
                ),
            )
        )
        try:
            link = self._link
            if link is None and self._settings.pp > 1:
                raise Internal("this worker has left the others")
            if link is None or part.first:
                hidden = transformer.embedded(torch.from_numpy(tokens.copy()))
            else:
                hidden = link.take_over(len(tokens), self._settings.hidden, self._dtype)
            hidden = transformer.run(hidden, torch.from_numpy(positions.copy()), store)
            if link is None or part.last:
                rows = torch.from_numpy(wanted.copy())
                own = self._logits[int(begin[0]) : int(begin[0]) + len(rows)]
                own.copy_(transformer.logits(hidden[rows]))
            else:
                link.pass_on(hidden)
        except BaseException:
            store.abort()
            self._leave()
            raise
        store.end()

    def close(self) -> None:
        """Release the pages."""
        self._prefaulter.close()
        if self._store is not None:
            self._store.close()

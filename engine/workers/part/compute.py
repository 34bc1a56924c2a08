"""A worker's part of each step."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from engine.execution.forward.model_runner import row_multiple
from engine.models import LoadedModel, ModelConfig, Part, load_model, split_model
from engine.protocol import Internal
from engine.workers.exchange import SharedSum, StepMessage, WorkerSettings
from engine.workers.part.stage_link import StageLink
from engine.workers.part.swapped_pages import Done, SwapCounts, SwappedPages
from kvcache.memory import KVLayout, PartRegion, Prefaulter, SplitLayout
from kvcache.page_store import TorchPageStore
from kvcache.sequences import StepDescription

__all__ = ["Answer", "PartWorker"]

# What is told of a step: why it failed, microseconds that it was computed, what was moved for it.
Answer = Callable[[Exception | None, int, SwapCounts], object]


class _StepPages(Protocol):
    """The pages of steps, one step after another."""

    def announce(self, step: StepDescription) -> None: ...
    def begin(self) -> None: ...
    def attention(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor: ...
    def end(self, done: Done) -> None: ...
    def abort(self, done: Done) -> None: ...
    def close(self) -> None: ...


class _MappedPages:
    """The lead's own pages, in place: `SwappedPages` without swapping."""

    def __init__(self, region: PartRegion, *, query_heads: int) -> None:
        self._store = TorchPageStore(region, query_heads=query_heads)
        self._step = StepDescription((), ())
        self.attention = self._store.attention
        self.close = self._store.close

    def announce(self, step: StepDescription) -> None:
        self._step = step

    def begin(self) -> None:
        self._store.begin(self._step)

    def end(self, done: Done) -> None:
        self._store.end()
        done(None, SwapCounts())

    def abort(self, done: Done) -> None:
        self._store.abort()
        done(None, SwapCounts())


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
        self._pages: _StepPages | None = None
        vocab = self.model.config.vocab_size
        size = settings.logits_rows * vocab * 4
        memory = mmap.mmap(settings.logits_fd, size)
        logits = torch.frombuffer(memory, dtype=torch.float32).view(-1, vocab)
        own = self._transformer.part.vocab
        self._logits = logits[:, own.start : own.stop]

    def _part(self, config: ModelConfig) -> Part:
        return self._parts(config)[self._settings.rank]

    def _parts(self, config: ModelConfig) -> list[Part]:
        settings = self._settings
        return split_model(config, tp=settings.tp, pp=settings.pp, decodes=settings.decodes)

    @property
    def row_multiple(self) -> int:
        """As of `engine.execution.forward.model_runner.row_multiple`."""
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
        split = SplitLayout(whole, tuple(part.shard for part in self._parts(config)))
        region = PartRegion(lead, fd, at, split, settings.rank)
        self._prefaulter.add(region)
        heads = config.num_heads
        if settings.device_pages:
            own = split.parts[settings.rank][1]
            pages_ = settings.device_pages
            self._pages = SwappedPages(region.pool, own, pages_, query_heads=heads)
        else:
            self._pages = _MappedPages(region, query_heads=heads)

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
    def _step_pages(self) -> _StepPages:
        """Raises `Internal` before there are any pages."""
        if self._pages is None:
            raise Internal("no pages are allocated")
        return self._pages

    def announce(self, message: StepMessage) -> None:
        """Note a step that `step` will compute after those announced before. On any thread."""
        self._step_pages.announce(message.step)

    @torch.inference_mode()
    def step(self, message: StepMessage, answer: Answer) -> None:
        """Compute a step that was announced. Call `answer` when its tokens are in the lead's pool.

        That may be on another thread, but in the order of the steps. If the step fails, no token of
        it counts as present, and this worker has left the other stages: `rejoin` has to follow.
        """
        pages = self._step_pages
        try:
            pages.begin()
            computed_us = self._compute(message, pages)
        except Exception as error:  # noqa: BLE001  the lead says what becomes of it
            failure = error
            self._leave()
            pages.abort(lambda _failure, moved: answer(failure, 0, moved))
        else:
            pages.end(lambda failure, moved: answer(failure, computed_us, moved))

    def _compute(self, message: StepMessage, pages: _StepPages) -> int:
        """Compute a step; return the µs it took, without those of waiting for other stages."""
        transformer, part, link = self._transformer, self._transformer.part, self._link
        if link is None and self._settings.pp > 1:
            raise Internal("this worker has left the others")
        if link is None or part.first:
            began = time.perf_counter()
            hidden = transformer.embedded(torch.from_numpy(message.tokens.copy()))
        else:
            hidden = link.take_over(len(message.tokens), self._settings.hidden, self._dtype)
            began = time.perf_counter()
        hidden = transformer.run(hidden, torch.from_numpy(message.positions.copy()), pages)
        if link is None or part.last:
            rows = torch.from_numpy(message.wanted.copy())
            own = self._logits[message.begin : message.begin + len(rows)]
            own.copy_(transformer.logits(hidden[rows]))
        took = time.perf_counter() - began
        if link is not None and not part.last:
            link.pass_on(hidden)
        return round(took * 1e6)

    def close(self) -> None:
        """Release the pages."""
        self._prefaulter.close()
        if self._pages is not None:
            self._pages.close()

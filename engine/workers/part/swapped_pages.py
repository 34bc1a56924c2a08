"""Microbatch swapping: a worker whose own memory holds the pages of two steps at a time.

    pool of the lead (host)     all pages of this part
                                  │ fetch: pages              ▲ write back: new tokens
    memory of the worker          ▼                           │
    (device)                    half A: step x, computed    half B: step x + 1, fetched

While a step is computed in one half, the pages of the next one are fetched into the other half, and
the new tokens of the one before are written back (DéjàVu, §4.2.2). So a pipeline holds as many
microbatches as the host's memory has room for. The lead, and peers that put, know the host's pages
only; those have all tokens of the steps that have ended, so a worker that dies takes none with it.

On a CPU both are the same kind of memory. There it serves to prove and measure the mechanism, and
to keep what a worker computes on in the memory of its own NUMA node.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from kvcache.attention import row_slots
from kvcache.errors import Internal, NoCapacity
from kvcache.memory import KVLayout, LocalRegion
from kvcache.page_store import TorchPageStore
from kvcache.sequences import StepDescription

__all__ = ["Done", "SwapCounts", "SwappedPages"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SwapCounts:
    """What a step has moved."""

    waited_us: int = 0  # that computing waited for the fetch
    fetched_bytes: int = 0
    written_bytes: int = 0


Done = Callable[[Exception | None, SwapCounts], object]


@dataclass(slots=True, eq=False)
class _Step:
    """A step on its way through: announced, fetched, computed, written back."""

    host: StepDescription  # with the lead's pages
    used: npt.NDArray[np.int32]  # its pages, each once
    written: frozenset[int]  # those of them that get new tokens
    half: int = -1
    device: StepDescription | None = None  # with this worker's pages, once fetched
    failure: Exception | None = None
    waited_us: int = 0
    fetched_bytes: int = 0
    computed: bool = False
    done: Done = field(default=lambda _failure, _counts: None)


class SwappedPages:
    """Pages of steps, in the order in which these are announced. It has one thread of its own.

    `begin`, `attention` and `end` or `abort` belong to the thread that computes.
    """

    def __init__(
        self, host: torch.Tensor, layout: KVLayout, pages: int, *, query_heads: int
    ) -> None:
        """Allocate `pages` pages.

        `host` is this part of the lead's pool, in the shape of `layout`. `query_heads` are those of
        the whole model.
        """
        self._page_size = layout.page_size
        self._half = pages // 2
        region = LocalRegion(replace(layout, pages=2 * self._half + 1))  # plus the scratch page
        self._store = TorchPageStore(region, query_heads=query_heads)
        self._host, self._device = host, region.pool
        self._host_pages, self._device_pages = _by_page(host), _by_page(region.pool)
        self._changed = threading.Condition()  # guards all that follows
        self._announced: deque[_Step] = deque()
        self._fetched: deque[_Step] = deque()  # oldest first; `begin` waits for the first one
        self._ended: deque[_Step] = deque()
        self._free = deque([0, 1])  # halves
        self._closed = False
        self._current: _Step | None = None
        threading.Thread(target=self._run, name="swapping", daemon=True).start()

    def announce(self, step: StepDescription) -> None:
        """Fetch the pages of a step as soon as there is room. On any thread."""
        page_size = self._page_size
        used: list[npt.NDArray[np.int32]] = []
        written: set[int] = set()
        for span in step.spans:
            first, end = span.start // page_size, -(-(span.start + span.count) // page_size)
            used.append(span.pages[:end])
            written.update(span.pages[first:end].tolist())
        pages = np.unique(np.concatenate(used)).astype(np.int32)
        with self._changed:
            self._announced.append(_Step(step, pages, frozenset(written)))
            self._changed.notify_all()

    def begin(self) -> None:
        """Wait until the pages of the step that was announced first are here.

        Raises `NoCapacity` if there are more of them than half of this memory; `abort` has to
        follow then, as after every failure.
        """
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._fetched)
            step = self._current = self._fetched[0]
        step.waited_us = round((time.perf_counter() - began) * 1e6)
        if step.failure is not None or step.device is None:
            raise step.failure or Internal("a step was not fetched")
        self._store.begin(step.device)

    def attention(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """See `PageStore.attention`."""
        return self._store.attention(layer, q, k, v)

    def end(self, done: Done) -> None:
        """End the step. When its tokens are in the lead's pool, call `done`, on another thread."""
        self._store.end()
        self._finish(done, computed=True)

    def abort(self, done: Done) -> None:
        """Forget the step; nothing of it is written back. Calls `done` after those before it."""
        self._store.abort()
        self._finish(done, computed=False)

    def close(self) -> None:
        """Stop fetching."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _finish(self, done: Done, *, computed: bool) -> None:
        with self._changed:
            step, self._current = self._current, None
            if step is None:
                raise Internal("no step has begun")
            self._fetched.popleft()
            step.computed, step.done = computed, done
            self._ended.append(step)
            self._changed.notify_all()

    # On the thread of this object

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._ended or self._can_fetch())
                if self._closed:
                    return
                ended = self._ended[0] if self._ended else None
                step = ended or self._announced[0]
            if ended is not None:
                self._write_back(ended)
            else:
                self._fetch(step)

    def _can_fetch(self) -> bool:
        """Whether the next step has room, and no earlier one still writes what it reads."""
        if not self._announced or not self._free:
            return False
        written = [step.written for step in (*self._fetched, *self._ended)]
        return not written or frozenset().union(*written).isdisjoint(
            self._announced[0].used.tolist()
        )

    def _fetch(self, step: _Step) -> None:
        with self._changed:
            step.half = self._free.popleft()
        try:
            self._copy_in(step)
        except Exception as error:  # noqa: BLE001  `begin` raises it
            step.failure = error
        with self._changed:
            self._announced.popleft()
            self._fetched.append(step)
            self._changed.notify_all()

    def _copy_in(self, step: _Step) -> None:
        used = step.used
        if len(used) > self._half:
            raise NoCapacity(f"a step of {len(used)} pages, where {self._half} fit")
        first, size = 1 + step.half * self._half, self._page_size
        present = self._present(step)
        torch.index_select(
            self._host_pages,
            0,
            torch.from_numpy(present.astype(np.int64)),
            out=self._device_pages[first : first + len(present)],
        )
        step.fetched_bytes = len(present) * self._host_pages[0].nbytes
        order = np.concatenate([present, np.setdiff1d(used, present, assume_unique=True)])
        places = np.empty(int(used[-1]) + 1, dtype=np.int32)
        places[order] = np.arange(first, first + len(order), dtype=np.int32)
        step.device = StepDescription(
            (),
            tuple(
                replace(span, pages=places[span.pages[: -(-(span.start + span.count) // size)]])
                for span in step.host.spans
            ),
        )

    def _present(self, step: _Step) -> npt.NDArray[np.int32]:
        """Return the pages of a step that have tokens; the others need no copy."""
        size = self._page_size
        tables = [span.pages[: -(-span.start // size)] for span in step.host.spans]
        return np.unique(np.concatenate(tables)).astype(np.int32)

    def _write_back(self, step: _Step) -> None:
        written, failure = 0, None
        if step.computed and step.device is not None:
            try:
                written = self._copy_out(step.host, step.device)
            except Exception as error:
                log.exception("a step could not be written back")
                failure = error
        step.done(failure, SwapCounts(step.waited_us, step.fetched_bytes, written))
        with self._changed:
            self._ended.popleft()
            self._free.append(step.half)
            self._changed.notify_all()

    def _copy_out(self, host: StepDescription, device: StepDescription) -> int:
        """Copy the new tokens of a step to the lead's pool; return their bytes."""
        to = torch.from_numpy(row_slots(host.spans, self._page_size))
        source = torch.from_numpy(row_slots(device.spans, self._page_size))
        rows = self._device[:, source[:, 0], :, source[:, 1]]
        self._host[:, to[:, 0], :, to[:, 1]] = rows
        return rows.nbytes


def _by_page(pool: torch.Tensor) -> torch.Tensor:
    """Return a view of a pool with a row for each page."""
    pages = pool.transpose(0, 1)
    return pages.view(len(pages), -1)

"""Byte ranges to copy between two pools that differ in pages, layers or heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvcache.errors import BadAddress
from kvcache.memory import BlockLayout, KVLayout, PoolLayout, SplitLayout
from kvcache.shard import Overlap, overlap
from kvcache.types import PageId

__all__ = ["BlockRoute", "PageRoute", "Route", "Runs", "SplitRoute", "route_between"]

CUT = 4096
Runs = npt.NDArray[np.int64]  # [runs, 3]: offset in the source pool, in the target pool, bytes


class Route(Protocol):
    """Plans copies from one pool into the pages of a lease in another."""

    def batches(
        self,
        layers: range,
        pages: Sequence[PageId] | npt.NDArray[np.int64],
        begin: int,
        end: int,
        max_bytes: int,
    ) -> Iterator[tuple[Runs, int]]:
        """Yield the runs for positions `[begin, end)` of the source's `layers`, with their bytes.

        Each batch has at most `max_bytes` bytes, if its shortest run allows. `pages[i]` is the
        source's page for positions from `i * page_size` on.
        """
        ...


def route_between(
    source: PoolLayout, target: PoolLayout, pages: Sequence[PageId], first: int
) -> Route:
    """Return the route between two pools, whose engines have equal fingerprints.

    `pages[0]` is the target's page for positions from `first * page_size` on. Raises `BadAddress`
    for pools of different kinds.
    """
    if isinstance(source, KVLayout) and isinstance(target, KVLayout):
        return PageRoute(source, target, pages, first)
    if isinstance(source, BlockLayout) and isinstance(target, BlockLayout):
        return BlockRoute(source, target, pages, first)
    if not isinstance(source, BlockLayout) and not isinstance(target, BlockLayout):
        return SplitRoute(source, target, pages, first)
    raise BadAddress("the two pools are of different kinds", param="kv_addr")


class PageRoute:
    """Plans copies from one pool into the pages of a lease in another.

    The pools may hold different parts of the model (`kvcache.shard`) and have different numbers of
    pages. Equal fingerprints guarantee that the rest of their layouts is equal. A position has the
    same slot within its page on both sides.
    """

    def __init__(
        self, source: KVLayout, target: KVLayout, pages: Sequence[PageId], first: int
    ) -> None:
        """`pages[0]` is the target's page for positions from `first * page_size` on."""
        self._source, self._target = source, target
        self._pages, self._first = np.asarray(pages, dtype=np.int64), first
        self._common = overlap(source.held, target.held)

    def batches(
        self,
        layers: range,
        pages: Sequence[PageId] | npt.NDArray[np.int64],
        begin: int,
        end: int,
        max_bytes: int,
    ) -> Iterator[tuple[Runs, int]]:
        """Yield the runs for positions `[begin, end)` of the source's `layers`, with their bytes.

        Each batch has at most `max_bytes` bytes. Layers and heads that the target does not hold are
        left out. `pages[i]` is the source's page for positions from `i * page_size` on.
        """
        common = self._common
        if common is None:
            return
        ours = common.layers_in(self._source.held)
        layers = range(max(layers.start, ours.start), min(layers.stop, ours.stop))
        if not layers or begin == end:
            return
        table = np.asarray(pages, dtype=np.int64)
        whole = range(-(-begin // self._source.page_size), end // self._source.page_size)
        if len(whole) > 0 and self._is_all(common, layers):
            size = self._source.page_size
            parts = [
                self._of_layers(common, layers, table, low, high)
                for low, high in ((begin, whole.start * size), (whole.stop * size, end))
                if low < high
            ]
            runs = _coalesce(np.concatenate([*parts, self._all_of_pages(table, whole)]))
        else:
            runs = self._of_layers(common, layers, table, begin, end)
        for batch in _split(runs, max_bytes):
            yield batch, int(batch[:, 2].sum())

    def _is_all(self, common: Overlap, layers: range) -> bool:
        """Return whether all that both pools have of a page is sent: it is one run then."""
        ours, theirs = self._source.held, self._target.held
        return len(layers) == ours.layers == theirs.layers and (
            common.heads == ours.heads == theirs.heads
        )

    def _all_of_pages(self, pages: npt.NDArray[np.int64], whole: range) -> Runs:
        """Return a run for each whole page. `whole` are their indices."""
        size = self._source.page_bytes
        runs = np.empty((len(whole), 3), dtype=np.int64)
        runs[:, 0] = pages[whole.start : whole.stop] * size
        runs[:, 1] = self._pages[whole.start - self._first : whole.stop - self._first] * size
        runs[:, 2] = size
        return runs

    def _of_layers(
        self,
        common: Overlap,
        layers: range,
        pages: npt.NDArray[np.int64],
        begin: int,
        end: int,
    ) -> Runs:
        """Return the runs of `layers` of the source."""
        ours, theirs = (common.layers_in(side.held) for side in (self._source, self._target))
        strides = np.array([self._source.layer_bytes, self._target.layer_bytes, 0])
        shift = np.array([0, theirs.start - ours.start, 0])
        of_layers = (np.array(layers)[:, np.newaxis] + shift) * strides
        of_pages = self._runs(common, pages, begin, end)
        runs: Runs = (of_pages[:, np.newaxis] + of_layers).reshape(-1, 3)
        if len(layers) > 1 or min(side.held.layers for side in (self._source, self._target)) == 1:
            return _coalesce(runs)
        return runs  # those of one layer of several have others between them

    def _runs(self, common: Overlap, pages: npt.NDArray[np.int64], begin: int, end: int) -> Runs:
        """Return the runs of layer 0. Other layers have the same runs at an offset."""
        if common.heads == self._source.held.heads == self._target.held.heads:
            return self._of_pages(pages, begin, end)
        return self._of_tokens(common, pages, begin, end)

    def _of_pages(self, pages: npt.NDArray[np.int64], begin: int, end: int) -> Runs:
        """Return runs where both sides hold the same heads: one per page.

        A page that is copied in part has two, its keys and its values.
        """
        size, token = self._source.page_size, self._source.token_bytes // 2
        source, target = self._source.page_bytes, self._target.page_bytes
        first, last = -(-begin // size), end // size  # indices of the complete pages
        edges = [(begin, first * size), (last * size, end)] if first <= last else [(begin, end)]
        runs: list[tuple[int, int, int]] = []
        for low, high in edges:
            if low < high:
                index, within = low // size, low % size * token
                from_offset = int(pages[index]) * source + within
                to_offset = int(self._pages[index - self._first]) * target + within
                for half in (0, size * token):  # keys, values
                    runs.append((from_offset + half, to_offset + half, (high - low) * token))
        partial = np.array(runs, dtype=np.int64).reshape(-1, 3)
        if first >= last:
            return partial
        whole = np.empty((last - first, 3), dtype=np.int64)
        whole[:, 0] = pages[first:last] * source
        whole[:, 1] = self._pages[first - self._first : last - self._first] * target
        whole[:, 2] = self._source.layer_bytes
        return np.concatenate((partial, whole))

    def _of_tokens(
        self, common: Overlap, pages: npt.NDArray[np.int64], begin: int, end: int
    ) -> Runs:
        """Return runs where the heads differ: one for each token's keys, one for its values."""
        index, slot = np.divmod(np.arange(begin, end), self._source.page_size)
        half = np.array([[0], [1]])  # keys, values
        columns = []
        for layout, page in (
            (self._source, pages[index]),
            (self._target, self._pages[index - self._first]),
        ):
            token = layout.token_bytes // 2
            head = common.heads_in(layout.held).start * layout.head_bytes
            row = half * layout.page_size + slot
            columns.append((page * layout.page_bytes + row * token + head).ravel())
        width = np.full_like(columns[0], common.heads * self._source.head_bytes)
        return np.stack((*columns, width), axis=1)


class SplitRoute:
    """Plans copies where a pool has several parts: those of each part into each other (DistServe).

    Parts without common layers and heads have none.
    """

    def __init__(
        self, source: PoolLayout, target: PoolLayout, pages: Sequence[PageId], first: int
    ) -> None:
        """`pages[0]` is the target's page for positions from `first * page_size` on."""
        self._from_model = isinstance(source, SplitLayout)  # layers are those of the model
        self._routes = [
            (ours.held, np.array([from_byte, to_byte, 0]), PageRoute(ours, theirs, pages, first))
            for from_byte, ours in _parts(source)
            for to_byte, theirs in _parts(target)
            if overlap(ours.held, theirs.held) is not None
        ]

    def batches(
        self,
        layers: range,
        pages: Sequence[PageId] | npt.NDArray[np.int64],
        begin: int,
        end: int,
        max_bytes: int,
    ) -> Iterator[tuple[Runs, int]]:
        """Implement `Route.batches`, one pair of parts after the other."""
        for held, shift, route in self._routes:
            own = layers
            if self._from_model:
                low, high = max(layers.start, held.layer), min(layers.stop, held.layer_end)
                own = range(low - held.layer, max(low, high) - held.layer)
            for runs, size in route.batches(own, pages, begin, end, max_bytes):
                yield runs + shift, size


def _parts(layout: PoolLayout) -> list[tuple[int, KVLayout]]:
    """Return where each part of a pool begins, in bytes, and its layout."""
    if isinstance(layout, SplitLayout):
        return layout.parts
    if isinstance(layout, KVLayout):
        return [(0, layout)]
    raise BadAddress("the two pools are of different kinds", param="kv_addr")


class BlockRoute:
    """Plans copies between pools of opaque blocks: every block of a range, whole."""

    def __init__(
        self, source: BlockLayout, target: BlockLayout, pages: Sequence[PageId], first: int
    ) -> None:
        """`pages[0]` is the target's block for positions from `first * page_size` on."""
        self._source, self._target = source, target
        self._pages, self._first = np.asarray(pages, dtype=np.int64), first

    def batches(
        self,
        layers: range,
        pages: Sequence[PageId] | npt.NDArray[np.int64],
        begin: int,
        end: int,
        max_bytes: int,
    ) -> Iterator[tuple[Runs, int]]:
        """Implement `Route.batches`; blocks that the range covers in part are copied whole."""
        if begin == end or not layers:
            return
        size = self._source.page_size
        first, last = begin // size, -(-end // size)
        blocks = np.asarray(pages, dtype=np.int64)[first:last]
        theirs = self._pages[first - self._first : last - self._first]
        of_blocks = np.stack(
            (
                blocks * self._source.block_stride,
                theirs * self._target.block_stride,
                np.full_like(blocks, self._source.layer_bytes),
            ),
            axis=1,
        )
        strides = np.array([self._source.layer_stride, self._target.layer_stride, 0])
        of_layers = np.array(layers)[:, np.newaxis] * strides
        if self._source.by_block:
            runs = of_blocks[:, np.newaxis] + of_layers
        else:
            runs = of_blocks + of_layers[:, np.newaxis]
        runs = _coalesce(runs.reshape(-1, 3))
        for batch in _split(runs, max_bytes):
            yield batch, int(batch[:, 2].sum())


def _coalesce(runs: Runs) -> Runs:
    """Merge consecutive runs that are adjacent on both sides."""
    ends = runs[:-1, :2] + runs[:-1, 2:]
    starts = np.flatnonzero(np.concatenate(([True], (runs[1:, :2] != ends).any(axis=1))))
    sizes = np.add.reduceat(runs[:, 2], starts)
    return np.column_stack((runs[starts, :2], sizes))


def _split(runs: Runs, most: int) -> list[Runs]:
    """Split the runs into pieces of at most `most` bytes, which are equal up to rounding.

    Runs are cut at multiples of `CUT` bytes behind the first, so that copies of the pieces are
    aligned as those of the runs are.
    """
    ends = np.cumsum(runs[:, 2])
    total = int(ends[-1])
    if total <= most:
        return [runs]
    unit = CUT if most >= CUT else 1
    parts = -(-total // (most // unit * unit))
    step = -(-total // (parts * unit)) * unit
    starts = ends - runs[:, 2]
    bounds = [*range(0, total, step), total]
    pieces = []
    for low, high in pairwise(bounds):
        begin, end = np.maximum(starts, low), np.minimum(ends, high)
        skipped = begin - starts
        piece = np.stack((runs[:, 0] + skipped, runs[:, 1] + skipped, end - begin), axis=1)
        pieces.append(piece[piece[:, 2] > 0])
    return pieces

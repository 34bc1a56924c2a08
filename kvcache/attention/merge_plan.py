"""The merge of the parts of many spans at once: `combine`, planned once and run in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvcache.attention.block_tree import Node, fold, root
from kvcache.attention.held import check_cover, node_of
from kvcache.attention.partial import PartialAttention, SoftmaxSums, merge_into, stable_kernel
from kvcache.types import TokenPos

__all__ = ["MergePlan", "MergedSpan", "PartRows"]


class PartRows(NamedTuple):
    """A part over keys `[begin, end)`; its first row in the tensors that are merged."""

    begin: TokenPos
    end: TokenPos
    row: int


class _Merged(NamedTuple):
    row: int  # the first one
    turn: int  # when it is complete


class MergedSpan(NamedTuple):
    """Rows of a step, the tokens at positions from `start`, and the parts that they come from."""

    row: int
    start: TokenPos
    rows: int
    parts: Sequence[PartRows]


class MergePlan:
    """Merges each span's parts in the order of `combine`, and so to the same bits.

    On a CPU with the kernel of float32 attention that is one call. Elsewhere it takes turns: merges
    of different spans, and of different halves of the tree, do not depend on each other, so each
    turn is one operation over the rows of all of them. There are as many turns as the deepest
    span's tree has levels, not as many as there are parts.
    """

    def __init__(self, spans: Sequence[MergedSpan]) -> None:
        """Raises `KVIncomplete` and `BadRequest` as `combine` does."""
        turns: list[list[tuple[int, int, int]]] = []  # first rows of both sides, and how many
        results: list[npt.NDArray[np.int64]] = []
        for row, start, count, parts in spans:
            ordered = sorted(parts)
            check_cover([(part.begin, part.end) for part in ordered], start, count)

            def merge(left: _Merged, right: _Merged, count: int = count) -> _Merged:
                turn = max(left.turn, right.turn)
                while len(turns) <= turn:
                    turns.append([])
                turns[turn].append((left.row, right.row, count))
                return _Merged(left.row, turn + 1)

            known: dict[Node, _Merged] = {}
            others: list[_Merged] = []
            for part in ordered:
                node = node_of(part.begin, part.end)
                if node is None:
                    others.append(_Merged(part.row, 0))
                else:
                    known[node] = _Merged(part.row, 0)
            result = fold(root(max((node.end for node in known), default=0)), known, merge)
            for other in others:
                result = other if result is None else merge(result, other)
            if result is not None:  # always: a part has key 0
                results.append(_pairs(result.row, row, count))
        per_turn = [np.concatenate([_pairs(*pair) for pair in turn]) for turn in turns]
        self._turns = [len(pairs) for pairs in per_turn]
        self._pairs = np.concatenate([*per_turn, _pairs(0, 0, 0)])
        self._results = np.concatenate([*results, _pairs(0, 0, 0)])  # and their rows of the step
        self._sources: tuple[int, ...] = ()  # addresses of the tensors that `_rows` is about
        self._rows = np.empty((0, 3), dtype=np.int64)  # addresses of each row

    def write(self, sources: Sequence[PartialAttention], out: torch.Tensor) -> None:
        """Write the attention of the spans to their rows of `out`, `[rows, heads, head_dim]`.

        `sources` have the rows of all parts, one after the other, and are overwritten.
        """
        kernel = stable_kernel() if out.device.type == "cpu" else None
        if kernel is None:
            self._write_in_turns(sources, out)
            return
        tensors = [each for some in sources for each in (some.values, some.top, some.total)]
        contiguous = [each.contiguous() for each in tensors]
        addresses = tuple(each.data_ptr() for each in contiguous)
        if addresses != self._sources:
            self._sources, self._rows = addresses, _addresses(contiguous)
        target = out if out.dtype == torch.float32 and out.is_contiguous() else out.float()
        kernel.merge_all(self._rows, self._pairs, self._results, target)
        if target is not out:
            out.copy_(target)

    def _write_in_turns(self, sources: Sequence[PartialAttention], out: torch.Tensor) -> None:
        device = out.device
        values = torch.cat([each.values.to(device) for each in sources])
        top = torch.cat([each.top.to(device) for each in sources])
        total = torch.cat([each.total.to(device) for each in sources])
        sums = SoftmaxSums(values, top.unsqueeze(-1), total.unsqueeze(-1))
        at = 0
        for count in self._turns:
            left, right = torch.from_numpy(self._pairs[at : at + count]).to(device).unbind(1)
            some = SoftmaxSums(*(tensor[left] for tensor in sums))
            merge_into(some, SoftmaxSums(*(tensor[right] for tensor in sums)))
            for tensor, result in zip(sums, some, strict=True):
                tensor[left] = result
            at += count
        merged, rows = torch.from_numpy(self._results).to(device).unbind(1)
        found = PartialAttention(values[merged], top[merged], total[merged])
        out[rows] = found.output(out.dtype)


def _pairs(left: int, right: int, count: int) -> npt.NDArray[np.int64]:
    """Return `[count, 2]`: the rows of both sides."""
    pairs: npt.NDArray[np.int64] = np.arange(count)[:, None] + np.array([left, right])
    return pairs


def _addresses(tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.int64]:
    """Return `[rows, 3]`: the addresses of the rows of values, tops and sums, of which each source
    has one tensor."""
    columns = [
        np.concatenate(
            [
                each.data_ptr() + np.arange(len(each)) * each.stride(0) * each.element_size()
                for each in tensors[column::3]
            ]
        )
        for column in range(3)
    ]
    return np.stack(columns, axis=1)

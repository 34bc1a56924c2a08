"""The merge of the parts of many spans at once: `combine`, planned once and run in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvcache.attention.block_tree import Node, fold, root
from kvcache.attention.held import check_cover, node_of
from kvcache.attention.partial import PartialAttention, SoftmaxSums, merge_into
from kvcache.types import TokenPos

__all__ = ["MergePlan", "PartRows"]


class PartRows(NamedTuple):
    """A part over keys `[begin, end)`; its first row in the tensors that are merged."""

    begin: TokenPos
    end: TokenPos
    row: int


class _Merged(NamedTuple):
    row: int  # the first one
    turn: int  # when it is complete


class MergePlan:
    """Merges each span's parts in the order of `combine`, and so to the same bits.

    Merges of different spans, and of different halves of the tree, do not depend on each other. So
    they are done in turns, each of which is one operation over the rows of all of them: as many
    turns as the deepest span's tree has levels, not as many as there are parts.
    """

    def __init__(self, spans: Sequence[tuple[TokenPos, int, Sequence[PartRows]]]) -> None:
        """Each span has a start, a count of rows, and its parts.

        Raises `KVIncomplete` and `BadRequest` as `combine` does.
        """
        turns: list[list[tuple[int, int, int]]] = []  # first rows of both sides, and how many
        merged: list[torch.Tensor] = []
        for start, count, parts in spans:
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
                merged.append(torch.arange(result.row, result.row + count))
        self._turns = [
            (_rows([(left, count) for left, _, count in turn]),
             _rows([(right, count) for _, right, count in turn]))
            for turn in turns
        ]  # fmt: skip
        self._merged = torch.cat(merged)

    def merge(self, rows: PartialAttention) -> PartialAttention:
        """Return the results of all spans, one span's rows after the other's.

        `rows` has the rows of all parts, and is overwritten.
        """
        sums = SoftmaxSums(rows.values, rows.top.unsqueeze(-1), rows.total.unsqueeze(-1))
        device = rows.values.device
        for left, right in self._turns:
            left, right = left.to(device), right.to(device)
            some = SoftmaxSums(*(tensor[left] for tensor in sums))
            merge_into(some, SoftmaxSums(*(tensor[right] for tensor in sums)))
            for tensor, result in zip(sums, some, strict=True):
                tensor[left] = result
        merged = self._merged.to(device)
        return PartialAttention(rows.values[merged], rows.top[merged], rows.total[merged])


def _rows(runs: list[tuple[int, int]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.arange(row, row + n) for row, n in runs]))

"""Shards of a model, and the overlap of two shards when engines are split differently.

An engine may be split over workers, by layers (pipeline parallel) and KV heads (tensor parallel).
A put between two such engines only copies: each worker of the sender writes to each worker of the
receiver the intersection of their layers and heads. Workers without an intersection do not connect.
Source: DistServe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from kvcache.errors import BadRequest

__all__ = ["Overlap", "Shard", "overlap", "split"]


@dataclass(frozen=True, slots=True)
class Shard:
    """One worker's part of the model: layers `[layer, layer_end)`, KV heads `[head, head_end)`."""

    layer: int
    layer_end: int
    head: int
    head_end: int

    @property
    def layers(self) -> int:
        return self.layer_end - self.layer

    @property
    def heads(self) -> int:
        return self.head_end - self.head


@dataclass(frozen=True, slots=True)
class Overlap:
    """The intersection of two shards, in layers and heads of the model."""

    layer: int
    layer_end: int
    head: int
    head_end: int

    @property
    def heads(self) -> int:
        return self.head_end - self.head

    def layers_in(self, shard: Shard) -> range:
        """Return the common layers as indices into the layers of `shard`."""
        return range(self.layer - shard.layer, self.layer_end - shard.layer)

    def heads_in(self, shard: Shard) -> slice:
        """Return the common heads as indices into the heads of `shard`."""
        return slice(self.head - shard.head, self.head_end - shard.head)


def split(layers: int, heads: int, *, pp: int, tp: int, last: float = 0.0) -> list[Shard]:
    """Return the shards of `pp * tp` workers, pipeline stage by stage.

    The last stage has other work too, as much as `last` layers, and therefore fewer layers. If a
    count does not divide evenly, the first parts get one more. Raises `BadRequest` for more parts
    than layers or heads.
    """
    if not 1 <= pp <= layers:
        raise BadRequest(f"{layers} layers cannot be split over {pp} stages", param="pp")
    if not 1 <= tp <= heads:
        raise BadRequest(f"{heads} KV heads cannot be split over {tp} workers", param="tp")
    return [
        Shard(*layer_range, *head_range)
        for layer_range in _stages(layers, pp, last)
        for head_range in _ranges(heads, tp)
    ]


def overlap(sender: Shard, receiver: Shard) -> Overlap | None:
    """Return the part that `sender` writes into `receiver`; None if they have nothing in common."""
    common = Overlap(
        max(sender.layer, receiver.layer),
        min(sender.layer_end, receiver.layer_end),
        max(sender.head, receiver.head),
        min(sender.head_end, receiver.head_end),
    )
    if common.layer >= common.layer_end or common.head >= common.head_end:
        return None
    return common


def _stages(layers: int, stages: int, last: float) -> Sequence[tuple[int, int]]:
    """Return the layers of each stage, so that the one with the most work has as little as can be.

    Each has one layer at least.
    """
    work = [1.0] * (stages - 1) + [1.0 + last]
    counts = [1] * stages
    for _ in range(layers - stages):
        least = work.index(min(work))
        work[least] += 1
        counts[least] += 1
    return list(pairwise(accumulate(counts, initial=0)))


def _ranges(count: int, parts: int) -> Sequence[tuple[int, int]]:
    each, more = divmod(count, parts)
    ends = [each * part + min(part, more) for part in range(parts + 1)]
    return list(pairwise(ends))

"""A chunk: the part of a step that belongs to one sequence."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.types import SeqId

__all__ = ["Chunk"]


class Chunk:
    """The next `tokens` of a sequence. With `sample`, the last token's logits are needed."""

    __slots__ = ("sample", "seq_id", "tokens")

    def __init__(self, seq_id: SeqId, tokens: Sequence[int], sample: bool) -> None:
        self.seq_id = seq_id
        self.tokens = tokens
        self.sample = sample

"""What both sides of an exchange agree on: the shape of queries and results, and limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from kvcache.errors import BadRequest, Unsupported
from kvcache.memory import KVLayout

__all__ = ["DTYPES", "AttentionShape", "Limits"]

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FLOAT32_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The shape of a model's attention, and of the pages that hold its KV."""

    dtype: str  # of queries and pages, as in `DTYPES`
    layers: int
    heads: int  # query heads
    kv_heads: int
    head_dim: int
    page_size: int  # tokens

    @classmethod
    def of(cls, layout: KVLayout, query_heads: int) -> AttentionShape:
        """Return the shape of a pool that holds the whole model.

        Raises `Unsupported` for a pool with a part of the layers or heads, or of another dtype.
        """
        names = {dtype: name for name, dtype in DTYPES.items()}
        if layout.shard is not None or layout.dtype not in names:
            raise Unsupported("queries are shipped in float32 and bfloat16, to whole pools only")
        return cls(
            names[layout.dtype],
            layout.layers,
            query_heads,
            layout.kv_heads,
            layout.head_dim,
            layout.page_size,
        )

    @property
    def element_bytes(self) -> int:
        """Bytes of a number in queries and pages."""
        return DTYPES[self.dtype].itemsize

    @property
    def query_bytes(self) -> int:
        """Bytes of one row's query in one layer."""
        return self.heads * self.head_dim * self.element_bytes

    @property
    def part_floats(self) -> int:
        """Floats of one row's part in one layer: `o`, `m` and `l` of each head."""
        return self.heads * (self.head_dim + 2)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a creditor computes in one step of a debtor, at most; it tells debtors at the handshake.

    The limits bound the memory of a connection and the time of a computation, which nothing
    interrupts.
    """

    spans: int = 256
    rows: int = 1024
    pages: int = 1 << 16  # of all spans
    loans: int = 1024
    runs: int = 512  # of neighbouring pages, of all spans: each is a part or more
    context: int = 1 << 18  # positions of a sequence
    row_keys: int = 1 << 24  # keys that rows attend to, in one layer
    reply_bytes: int = 32 << 20

    @property
    def plan_bytes(self) -> int:
        """Bytes of the longest plan."""
        return 64 + 16 * self.spans + 12 * self.pages + (2 + 4 * 256) * self.loans

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Limits:
        """Return the limits that a creditor tells. Raises `BadRequest` for what is none."""
        try:
            limits = cls(**fields)
        except TypeError as error:
            raise BadRequest("the creditor runs an incompatible version") from error
        for name in cls.__dataclass_fields__:
            value = getattr(limits, name)
            if type(value) is not int or not 0 < value <= 1 << 32:
                raise BadRequest(f"a creditor's limit {name} is {value!r}")
        return limits

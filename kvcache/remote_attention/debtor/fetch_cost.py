"""Whether blocks are cheaper to fetch than to leave where they are (Infinite-LLM, section 4.6)."""

from __future__ import annotations

from typing import Final

from kvcache.errors import PeerUnreachable
from kvcache.remote_attention.debtor.estimates import Estimate
from kvcache.remote_attention.debtor.remote_attention import RemoteAttention
from kvcache.remote_attention.debtor.ship_or_pull import (
    pulled_bytes,
    ship_queries,
    shipped_bytes,
)
from kvcache.remote_attention.exchange import AttentionShape
from kvcache.types import EngineId

__all__ = ["MeasuredFetchCost"]

KEPT: Final = 0.9  # of the mean time of a fetch, with each further one


class MeasuredFetchCost:
    """Compares what is left of a generation with one transfer of its blocks at a creditor.

    A block that stays where it is costs an exchange in each layer of each step. A fetched one costs
    its bytes once. So for a generation that is expected to compute `rows` further tokens in `steps`
    steps, `n` blocks at one creditor are cheaper to fetch if

        layers · (steps · (latency + wait) + rows · row_bytes / bandwidth) > n · fetch_s

    where `row_bytes` is `shipped_bytes(1)`, and latency, wait and bandwidth are those measured in
    the exchanges with the creditor. `fetch_s` is the time of a fetch from it, as measured; before
    the first one, the bytes of a block over that bandwidth. The attention itself is left out: one
    of the two engines computes it. Where no bandwidth is known, the bytes are compared: fetch
    unless `rows · (2·H·d·b + 8·H) < 2·n·BLOCK·H_kv·d·b`.
    """

    def __init__(self, remote: RemoteAttention, block_tokens: int) -> None:
        """`remote` measures the exchanges. A block has `block_tokens` tokens."""
        self._remote = remote
        self._block_tokens = block_tokens
        self._fetch_s: dict[EngineId, float] = {}

    def fetched(self, creditor: EngineId, seconds: float) -> None:
        """Count a block that has come home after so many seconds."""
        before = self._fetch_s.get(creditor, seconds)
        self._fetch_s[creditor] = KEPT * before + (1 - KEPT) * seconds

    def cheaper(self, creditor: EngineId, blocks: int, rows: int, steps: int) -> bool:
        """Return whether to fetch all `blocks` blocks that a sequence has at a creditor."""
        shape = self._remote.shape
        try:
            known = self._remote.estimate(creditor)
        except PeerUnreachable:
            return False
        fetch_s = self._fetch_s.get(creditor) or self._transfer_s(shape, known)
        if not (known.samples and fetch_s):
            return not ship_queries(
                rows,
                blocks * self._block_tokens,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                element_bytes=shape.element_bytes,
            )
        travelling = shipped_bytes(
            rows,
            heads=shape.heads,
            head_dim=shape.head_dim,
            element_bytes=shape.element_bytes,
        )
        exchanges_s = steps * (known.latency_s + known.waited_s)
        ship_s = shape.layers * (exchanges_s + travelling * known.s_per_byte)
        return ship_s > blocks * fetch_s

    def _transfer_s(self, shape: AttentionShape, known: Estimate) -> float:
        """Return the time of a block at the bandwidth of the exchanges; 0 if it is not known."""
        size = pulled_bytes(
            self._block_tokens,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            element_bytes=shape.element_bytes,
        )
        return shape.layers * size * known.s_per_byte

"""Whether blocks are cheaper to fetch than to leave with their creditor, from known links."""

from __future__ import annotations

from engine.latency import Profile
from engine.virtual.loans.attention import MESSAGES, row_bytes
from kvcache.types import EngineId

__all__ = ["VirtualFetchCost"]


class VirtualFetchCost:
    """The rule of `kvcache.remote_attention.MeasuredFetchCost`, whose measurements are known."""

    def __init__(self, profile: Profile, block_tokens: int) -> None:
        self._layers, self._put, self._row_bytes = profile.layers, profile.put, row_bytes(profile)
        self._fetch_s = profile.put.seconds(
            block_tokens * profile.kv_bytes_per_token, profile.layers
        )

    def fetched(self, creditor: EngineId, seconds: float) -> None:
        """A fetch takes what the links say."""

    def cheaper(self, creditor: EngineId, blocks: int, rows: int, steps: int) -> bool:
        """See `FetchCost.cheaper`."""
        exchanges_s = steps * MESSAGES * self._put.layer_s
        ship_s = self._layers * (exchanges_s + rows * self._row_bytes / self._put.bandwidth)
        return ship_s > blocks * self._fetch_s

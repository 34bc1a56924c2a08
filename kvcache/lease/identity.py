"""Which engine this is, in which life, of which cluster, and whose KV it takes."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.types import EngineId

__all__ = ["Identity"]


@dataclass(frozen=True, slots=True)
class Identity:
    """What an engine's addresses say of it; fixed for the life of the process."""

    engine_id: EngineId
    epoch: int  # another one each time the engine starts
    secret: bytes  # the cluster's: signs addresses
    fingerprint: str  # of layout and weights: equal iff KV can travel (`KVLayout`)
    url: str = ""  # of its HTTP API; empty: it has none

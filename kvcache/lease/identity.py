"""The identity of an engine, as its addresses state it."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.types import EngineId

__all__ = ["Identity"]


@dataclass(frozen=True, slots=True)
class Identity:
    """The fields of an engine that its addresses carry; fixed for the life of the process."""

    engine_id: EngineId
    epoch: int  # differs each time the engine starts
    secret: bytes  # of the cluster; signs addresses
    fingerprint: str  # of layout and weights; equal if one engine can use the KV of the other
    url: str = ""  # of its HTTP API; empty if it has none

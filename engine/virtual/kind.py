"""What distinguishes virtual engines of one model beside their speed and configuration."""

from __future__ import annotations

from dataclasses import dataclass

from engine.protocol import ALL_CAPABILITIES, Capability

__all__ = ["EngineKind"]


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What an engine supports, and its kind of KV: engines with equal `kv` exchange theirs, if
    model and page size are equal too."""

    capabilities: tuple[Capability, ...] = ALL_CAPABILITIES
    kv: str = ""

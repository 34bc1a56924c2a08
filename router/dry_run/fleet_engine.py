"""An engine of a router's fleet, as a dry run imitates it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from engine.protocol import ALL_CAPABILITIES, Capability
from router.engines import Backend, Role

__all__ = ["FleetEngine", "differ", "fleet_engines"]


@dataclass(frozen=True, slots=True)
class FleetEngine:
    """Its id and role, what it supports, and its KV: engines with equal `kv` exchange theirs.

    The fields are JSON values, and those of the same names in `GET /admin/engines`.
    """

    id: str
    role: Role
    page_size: int
    kv: str
    capabilities: Collection[Capability]

    @property
    def like(self) -> tuple[object, ...]:
        """What is equal for engines that a strategy cannot tell apart."""
        return self.role, self.page_size, self.kv, frozenset(self.capabilities)


def fleet_engines(backends: Iterable[Backend]) -> list[FleetEngine]:
    """Return the engines that take new work."""
    return [
        FleetEngine(each.id, each.role, model.page_size, model.fingerprint, model.capabilities)
        for each in backends
        if each.usable and (model := each.model) is not None
    ]


def differ(engines: Collection[FleetEngine]) -> bool:
    """Whether they differ from what every dry run assumes: each call works between all of them."""
    lacking = any(len(set(each.capabilities)) < len(ALL_CAPABILITIES) for each in engines)
    return lacking or len({each.kv for each in engines}) > 1

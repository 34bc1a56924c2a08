"""What all strategies here are held against."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from router.conformance.deployment import Deployment, routed
from router.conformance.engine_process import EngineProcess, engines


@dataclass
class Ground:
    """Three engines, and one with a router of its own to compare with."""

    nodes: list[EngineProcess]
    oracle: Deployment


@asynccontextmanager
async def ground(model: str) -> AsyncIterator[Ground]:
    async with engines(model, 4) as (*nodes, alone), routed([alone], "data_parallel") as oracle:
        yield Ground(nodes, oracle)

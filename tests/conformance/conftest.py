"""Engines that all strategies here share; each has a router of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest_asyncio

from router.conformance.deployment import Deployment, routed
from router.conformance.node import Node, engines


@dataclass
class Ground:
    """Three engines, and one with a router of its own to compare with."""

    nodes: list[Node]
    oracle: Deployment


async def _ground(model: str) -> AsyncIterator[Ground]:
    async with engines(model, 4) as (*nodes, alone), routed([alone], "data_parallel") as oracle:
        yield Ground(nodes, oracle)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tiny() -> AsyncIterator[Ground]:
    async for ground in _ground("tiny"):
        yield ground


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def smollm2() -> AsyncIterator[Ground]:
    async for ground in _ground("smollm2"):
        yield ground

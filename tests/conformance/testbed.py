"""The engines that the conformance tests run strategies on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from router.conformance.deployment import Deployment, deployed
from router.conformance.engine_process import EngineProcess, running_engines


@dataclass
class Testbed:
    """Three engines for strategies, and the oracle: a fourth engine with a router of its own."""

    __test__ = False

    engines: list[EngineProcess]
    oracle: Deployment


@asynccontextmanager
async def testbed(model: str, flags: Sequence[Sequence[str]] = ()) -> AsyncIterator[Testbed]:
    async with (
        running_engines(model, 4, flags=flags) as (*engines, single),
        deployed([single], "data_parallel") as oracle,
    ):
        yield Testbed(engines, oracle)

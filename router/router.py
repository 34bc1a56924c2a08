"""The parts of one router, held together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from router.attempt import Runtime
from router.backlog import Backlog
from router.catalog import Catalog
from router.config import RouterConfig
from router.engine_client import EngineClient
from router.generations import Generations
from router.metrics import Metrics
from router.receipts import Receipts
from router.registry import Registry
from router.release import Releaser
from router.wire import Wire

__all__ = ["Router"]


@dataclass(frozen=True, slots=True)
class Router:
    """Made by `opened`; handlers are given it."""

    config: RouterConfig
    registry: Registry
    catalog: Catalog
    generations: Generations
    receipts: Receipts
    backlog: Backlog
    metrics: Metrics
    runtime: Runtime

    @classmethod
    @asynccontextmanager
    async def opened(cls, config: RouterConfig) -> AsyncIterator[Router]:
        """A router that watches its engines. Leaving ends the watching, waits for releases that
        are under way (each is bounded), and closes all connections.

        Raises `BadRequest` or `NotFound` if the configured strategy or its params are no good.
        """
        catalog = Catalog()
        if config.strategy.endswith(".py"):
            first = catalog.load_file(Path(config.strategy))
        else:
            first = catalog[config.strategy]
        generations = Generations(first.bind(config.params))
        metrics = Metrics()
        with ExitStack() as wires:

            def connect(url: str) -> EngineClient:
                wire = Wire(
                    url,
                    api_key=config.engine_api_key,
                    connect_timeout_s=config.connect_timeout_s,
                )
                wires.callback(wire.close)
                return EngineClient(wire)

            async with asyncio.TaskGroup() as tasks:
                registry = Registry(config, connect, tasks)
                releaser = Releaser(tasks, config.release_timeout_s)
                try:
                    for url in config.engines:
                        registry.add(url)
                    yield cls(
                        config=config,
                        registry=registry,
                        catalog=catalog,
                        generations=generations,
                        receipts=Receipts(config.max_receipts),
                        backlog=Backlog(config.max_queue),
                        metrics=metrics,
                        runtime=Runtime(config, registry, releaser, metrics),
                    )
                finally:
                    registry.close()

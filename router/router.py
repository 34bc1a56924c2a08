"""The parts of one router, held together."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from router.admission.keys import Key, Keys, make_key, parse_keys
from router.admission.queue import AdmissionQueue
from router.admission.rate_limit import RateLimits
from router.admission.retry_budget import RetryBudget
from router.admission.shutdown import Shutdown
from router.base.config import RouterConfig
from router.base.tls import client_context
from router.base.watched_file import WatchedFile
from router.engines.client import EngineClient
from router.engines.engines_file import EngineEntry, engine_url, parse_engines
from router.engines.http_client import HttpClient
from router.engines.registry import Registry
from router.legs.attempt import Runtime
from router.legs.releaser import Releaser
from router.rollout.audit_log import AuditLog
from router.rollout.catalog import Catalog
from router.rollout.revisions import Generations
from router.rollout.rollout import Rollout
from router.telemetry.events import Events
from router.telemetry.metrics import Metrics
from router.telemetry.receipts import Receipts
from router.telemetry.trace import Tracing, open_tracing

__all__ = ["Router"]


@dataclass(frozen=True, slots=True)
class Router:
    """Made by `opened`; handlers are given it."""

    config: RouterConfig
    registry: Registry
    catalog: Catalog
    control: Rollout
    receipts: Receipts
    backlog: AdmissionQueue
    metrics: Metrics
    runtime: Runtime
    keys: Keys
    limits: RateLimits
    tracing: Tracing
    drain: Shutdown

    @property
    def generations(self) -> Generations:
        return self.control.generations

    @property
    def events(self) -> Events:
        return self.control.events

    @classmethod
    @asynccontextmanager
    async def opened(cls, config: RouterConfig) -> AsyncIterator[Router]:
        """A router that watches its engines. Leaving ends the watching, waits for releases that
        are under way (each is bounded), and closes all connections.

        Raises `BadRequest` or `NotFound` if the configured strategy, its params or a configured
        file are no good, and `OSError` if the audit log cannot be opened.
        """
        engine_tls = client_context(config.engine_ca)
        files = _Files.read(config)
        tracing = open_tracing(os.environ)
        catalog = Catalog()
        first = catalog.find(config.strategy).bind(config.params)
        metrics, events, audit = Metrics(), Events(), AuditLog(config.audit_log)
        with ExitStack() as wires:
            async with asyncio.TaskGroup() as tasks:
                control = Rollout(
                    catalog,
                    first,
                    metrics=metrics,
                    events=events,
                    audit=audit,
                    strikes=config.block_strikes,
                )

                def connect(url: str) -> EngineClient:
                    wire = HttpClient(
                        url,
                        api_key=config.engine_api_key,
                        connect_timeout_s=config.connect_timeout_s,
                        tls=engine_tls,
                    )
                    wires.callback(wire.close)
                    return EngineClient(wire)

                registry = Registry(config, connect, tasks, events)
                releaser = Releaser(tasks, config.release_timeout_s)
                clock = asyncio.get_running_loop().time
                limits = RateLimits(config.requests_per_minute, config.tokens_per_minute, clock)
                keys = Keys(files.all_keys(config))
                watchers: list[asyncio.Task[None]] = []
                try:
                    for url in config.engines:
                        registry.add(engine_url(url))
                    if files.engines is not None:
                        registry.follow(files.engines.value)
                        watch = files.engines.watch(config.watch_s, registry.follow)
                        watchers.append(tasks.create_task(watch, name="engines file"))
                    if files.keys is not None:

                        def renew(_: list[Key]) -> None:
                            good = files.all_keys(config)
                            keys.replace(good)
                            limits.keep(good)

                        watch = files.keys.watch(config.watch_s, renew)
                        watchers.append(tasks.create_task(watch, name="keys file"))
                    yield cls(
                        config=config,
                        registry=registry,
                        catalog=catalog,
                        control=control,
                        receipts=Receipts(config.max_receipts),
                        backlog=AdmissionQueue(config.max_queue),
                        metrics=metrics,
                        runtime=Runtime(
                            config,
                            registry,
                            releaser,
                            metrics,
                            RetryBudget(config.retry_share),
                            tasks,
                        ),
                        keys=keys,
                        limits=limits,
                        tracing=tracing,
                        drain=Shutdown(),
                    )
                finally:
                    for watcher in watchers:
                        watcher.cancel()
                    events.close()
                    audit.close()
                    registry.close()
                    await asyncio.to_thread(tracing.close)


@dataclass(frozen=True, slots=True)
class _Files:
    """The watched files, as far as there are any. Reading raises `BadRequest`."""

    engines: WatchedFile[list[EngineEntry]] | None
    keys: WatchedFile[list[Key]] | None

    @classmethod
    def read(cls, config: RouterConfig) -> _Files:
        engines, keys = config.engines_file, config.api_key_file
        return cls(
            WatchedFile(Path(engines), parse_engines) if engines else None,
            WatchedFile(Path(keys), parse_keys) if keys else None,
        )

    def all_keys(self, config: RouterConfig) -> list[Key]:
        own = [make_key(config.api_key)] if config.api_key else []
        return [*own, *(self.keys.value if self.keys is not None else ())]

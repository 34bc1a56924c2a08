"""Makes the parts of a router from its configuration."""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from router.admission.keys import Key, Keys, make_key, parse_keys
from router.admission.queue import AdmissionQueue
from router.admission.rate_limit import RateLimits
from router.admission.retry_budget import RetryBudget
from router.admission.shutdown import Shutdown
from router.advice.advisor import Advisor
from router.api.parts import Router
from router.base.awake_clock import AwakeClock
from router.base.config import RouterConfig
from router.base.tls import client_context
from router.base.watched_file import WatchedFile
from router.discovery import Discovery, open_slices
from router.engines.api import EngineCalls
from router.engines.client import EngineClient
from router.engines.engines_file import EngineEntry, parse_engine, parse_engines
from router.engines.http_client import HttpClient
from router.engines.openai import Descriptions, OpenAIEngine, ServerAddress
from router.engines.registry import Registry
from router.execution.choice_runner import Execution
from router.execution.relocation import Relocations
from router.legs.attempt import Runtime
from router.legs.releaser import Releaser
from router.model import read_model_files
from router.pins.pins import Pins
from router.rollout.audit_log import AuditLog
from router.rollout.catalog import Catalog
from router.rollout.rollout import Rollout
from router.sharing import shared
from router.telemetry.activity import Activity
from router.telemetry.events import Events
from router.telemetry.metrics import Metrics
from router.telemetry.receipts import Receipts
from router.telemetry.trace import open_tracing
from router.telemetry.traffic import Traffic

__all__ = ["assembled"]

FIRST_LIST_S = 5.0  # for the first list of discovered engines; they may also come later


@asynccontextmanager
async def assembled(
    config: RouterConfig, link: socket.socket | None = None
) -> AsyncIterator[Router]:
    """A router that watches its engines while the body runs.

    `link`, of a worker process, leads to its parent.

    On exit it stops watching, waits for the releases under way (each is bounded), and closes all
    connections. Raises `BadRequest` or `NotFound` if the configured strategy, its parameters or a
    configured file or model are invalid, `OSError` if the audit log cannot be opened, and what
    `open_slices`, and `Agreement.join` if the router has a store, raise.
    """
    engine_tls = client_context(config.engine_ca, config.engine_cert, config.engine_cert_key)
    files = _Files.read(config)
    tokenizer = config.openai_tokenizer
    described = await read_model_files(tokenizer) if tokenizer else None
    tracing = open_tracing(os.environ)
    catalog = Catalog()
    first = catalog.find(config.strategy).bind(config.params)
    metrics, events, audit_log = Metrics(), Events(), AuditLog(config.audit_log)
    rollout = Rollout(
        catalog,
        first,
        metrics=metrics,
        events=events,
        audit_log=audit_log,
        strikes=config.block_strikes,
        shared=bool(config.store) or link is not None,
    )
    clients: weakref.WeakSet[HttpClient] = weakref.WeakSet()
    try:

        def http_client(url: str, api_key: str) -> HttpClient:
            http = HttpClient(
                url,
                api_key=api_key,
                connect_timeout_s=config.connect_timeout_s,
                tls=engine_tls,
            )
            clients.add(http)
            return http

        def connect(url: str) -> EngineCalls:
            if not ServerAddress.names(url):
                return EngineClient(http_client(url, config.engine_api_key))
            address = ServerAddress.parse(url)
            http = http_client(address.base, config.openai_api_key)
            return OpenAIEngine(address, http, descriptions, tasks)

        async with open_slices(config.discover) as slices, asyncio.TaskGroup() as tasks:
            relocations, clock = Relocations(), asyncio.get_running_loop().time
            awake = AwakeClock(clock=clock)
            registry = Registry(
                config,
                connect,
                tasks,
                events,
                on_drain=relocations.leave,
                awake=awake,
                metrics=metrics,
            )
            descriptions = Descriptions(
                described,
                config.openai_context,
                lambda: [one.model for one in registry if one.model is not None],
            )
            releaser = Releaser(tasks, config.release_timeout_s)
            runtime = Runtime(config, registry, releaser, metrics, tasks)
            pins = Pins(runtime, events)
            keys = Keys(files.all_keys(config))
            traffic = Traffic(60 * config.traffic_minutes, config.traffic_mb << 20)
            watchers = [
                tasks.create_task(awake.run(), name="awake clock"),
                tasks.create_task(pins.run(), name="pins"),
            ]
            try:
                for text in config.engines:
                    entry = parse_engine(text)
                    registry.add(entry.url, role=entry.role, labels=entry.labels or None)
                if slices is not None:
                    discovery = Discovery(slices, registry)
                    watchers.append(tasks.create_task(discovery.run(), name="discovery"))
                    with suppress(TimeoutError):
                        await asyncio.wait_for(discovery.listed.wait(), FIRST_LIST_S)
                async with shared(
                    config, link, first=first, rollout=rollout, catalog=catalog,
                    audit_log=audit_log, registry=registry, tasks=tasks,
                ) as parts:  # fmt: skip
                    watchers += files.watch(config, tasks, registry, keys, parts.limits)
                    router = Router(
                        config=config,
                        registry=registry,
                        catalog=catalog,
                        rollout=rollout,
                        changes=parts.changes,
                        receipts=Receipts(config.max_receipts),
                        traffic=traffic,
                        activity=Activity(config.max_receipts),
                        metrics=metrics,
                        execution=Execution(
                            runtime,
                            AdmissionQueue(config.max_queue),
                            RetryBudget(config.retry_share),
                            relocations,
                        ),
                        pins=pins,
                        keys=keys,
                        limits=parts.limits,
                        tracing=tracing,
                        shutdown=Shutdown(),
                        advisor=Advisor(config, registry, catalog, rollout.revisions, traffic),
                        membership=parts.membership,
                        peers=parts.peers,
                    )
                    parts.serve(router)
                    yield router
            finally:
                for watcher in watchers:
                    watcher.cancel()
                events.close()
                audit_log.close()
                registry.close()
                releaser.close()
                await asyncio.to_thread(tracing.close)
    finally:
        for client in list(clients):
            client.close()


@dataclass(frozen=True, slots=True)
class _Files:
    """The watched files that are configured. Reading them raises `BadRequest`."""

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

    def watch(
        self,
        config: RouterConfig,
        tasks: asyncio.TaskGroup,
        registry: Registry,
        keys: Keys,
        limits: RateLimits,
    ) -> list[asyncio.Task[None]]:
        """Apply the files, now and whenever they change; return the tasks that do so."""
        watchers = []
        if self.engines is not None:
            registry.follow(self.engines.value)
            watch = self.engines.watch(config.watch_s, registry.follow)
            watchers.append(tasks.create_task(watch, name="engines file"))
        if self.keys is not None:

            def renew(_: list[Key]) -> None:
                good = self.all_keys(config)
                keys.replace(good)
                limits.keep(good)

            watch = self.keys.watch(config.watch_s, renew)
            watchers.append(tasks.create_task(watch, name="keys file"))
        return watchers

"""Makes the parts of a router that depend on whether it shares a store with others."""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from router.admission.rate_limit import RateLimits
from router.agreement.agreement import Agreement
from router.agreement.membership import Membership
from router.agreement.shared_limits import SharedLimits
from router.api.admin.live import outlines
from router.api.admin.receipts import receipt_of
from router.api.live import Part, part_of
from router.api.parts import Router
from router.api.peers import Peers
from router.api.probes import refreshed
from router.base.config import RouterConfig
from router.base.errors import NotFound
from router.engines.registry import Registry
from router.rollout.audit_log import AuditLog
from router.rollout.catalog import Catalog
from router.rollout.changes import Changes, LocalChanges
from router.rollout.rollout import Rollout
from router.store import Link, LinkedStore, RedisStore, SharedStore
from router.store.link import Handler
from router.store.linked import CHANGED
from router.store.notices import Notices
from router.strategy import Bound
from router.telemetry import Samples
from router.timeline import TracedRequest, traced

__all__ = ["Shared", "shared", "worker_name"]


@dataclass(slots=True)
class Shared:
    """The parts. A worker answers the questions of others once `serve` was called."""

    changes: Changes
    limits: RateLimits
    membership: Membership | None = None
    peers: Peers | None = None
    router: Router | None = None

    def serve(self, router: Router) -> None:
        """Answer by what `router` knows."""
        self.router = router

    async def metrics(self) -> Samples:
        """Return this process's metrics."""
        return refreshed(self.router).samples() if self.router is not None else []

    async def requests(self, seconds: float, most: int) -> list[TracedRequest]:
        """Return what a time line shows of the requests of the latest seconds."""
        if self.router is None:
            return []
        return [traced(one) for one in self.router.receipts.latest(seconds, most)]

    async def receipt(self, id: str) -> dict[str, Any] | None:
        """Return the receipt of a request, `None` if this process has none."""
        try:
            return receipt_of(self.router, id).describe() if self.router is not None else None
        except NotFound:
            return None

    async def live(self) -> Part | None:
        """Return this process's part of a snapshot."""
        return part_of(self.router) if self.router is not None else None

    async def outlines(self, *wanted: Any) -> list[dict[str, Any]]:
        """Return this process's requests in outline."""
        return outlines(self.router, *wanted) if self.router is not None else []


@asynccontextmanager
async def shared(
    config: RouterConfig,
    link: socket.socket | None,
    *,
    first: Bound,
    rollout: Rollout,
    catalog: Catalog,
    audit_log: AuditLog,
    registry: Registry,
    tasks: asyncio.TaskGroup,
) -> AsyncIterator[Shared]:
    """The parts, over the store that is configured, or that of the parent at the end of `link`.

    Without either, nothing is shared. On exit the other routers are told. Raises as `RedisStore`
    and `Agreement.join` do.
    """
    clock = asyncio.get_running_loop().time
    limited = (config.requests_per_minute, config.tokens_per_minute, clock)
    parts = Shared(LocalChanges(rollout), RateLimits(*limited))
    if not config.store and link is None:
        yield parts
        return
    store, running = _open(config, link, parts, tasks)
    running.append(tasks.create_task(store.run(), name="notices of the store"))
    limits = None
    following: list[asyncio.Task[None]] = []
    try:
        agreement = Agreement(store, rollout, catalog, audit_log, _name(config, link))
        registry.lending.orders_swaps = lambda: agreement.first
        await agreement.join(first)
        limits = SharedLimits(*limited, store=store, routers=lambda: agreement.routers, tasks=tasks)
        parts.changes, parts.limits = agreement, limits
        parts.membership = Membership(registry, store)
        await parts.membership.announce()
        following = [
            tasks.create_task(agreement.run(), name="agreement"),
            tasks.create_task(parts.membership.run(), name="membership"),
        ]
        yield parts
        await _end(following)  # they would announce this router again
        await agreement.leave()
    finally:
        if limits is not None:
            limits.close()
        await _end([*following, *running])
        await store.close()


def _open(
    config: RouterConfig, own: socket.socket | None, parts: Shared, tasks: asyncio.TaskGroup
) -> tuple[SharedStore, list[asyncio.Task[None]]]:
    """Return the store, and the tasks that run its connections."""
    running, store = [], None
    if own is not None:
        notices = Notices()
        handlers: dict[str, Handler] = {
            "alive": _alive,
            "metrics": parts.metrics,
            "receipt": parts.receipt,
            "requests": parts.requests,
            "live": parts.live,
            "outlines": parts.outlines,
        }
        link = Link(own, handlers, {CHANGED: notices.notify})
        running.append(tasks.create_task(link.run(), name="link to the parent"))
        parts.peers, store = Peers(link), LinkedStore(link, notices)
    if config.store or store is None:
        return RedisStore(config.store, password_file=config.store_password_file), running
    return store, running


async def _end(running: list[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)


async def _alive() -> None:
    """Answer the parent, which replaces a worker that does not."""


def worker_name(pid: int) -> str:
    """Return the name among the routers of a worker whose parent has their store."""
    return f"worker-{pid}"


def _name(config: RouterConfig, link: socket.socket | None) -> str:
    """Return this process's name among the routers."""
    if link is not None and not config.store:
        return worker_name(os.getpid())
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"

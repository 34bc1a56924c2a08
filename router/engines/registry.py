"""The engines that this router knows, each monitored by a task of its own."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress

from engine.protocol import EngineState, ModelInfo
from router.base import Conflict, EngineId, NoEngines, NotFound, RouterConfig
from router.engines.adoption import Adoption
from router.engines.api import EngineCalls
from router.engines.backend import Backend, Role, Source
from router.engines.circuit_breaker import BREAKER_STATES, CircuitBreaker
from router.engines.engines_file import EngineEntry
from router.engines.lending import Lending
from router.engines.monitor import Monitor
from router.engines.prefix_index import PrefixIndex
from router.engines.secrets import compare_secrets
from router.model import ServedModel
from router.telemetry import Events, Metrics

__all__ = ["Registry"]

log = logging.getLogger(__name__)

MOST_REMOVED = 4096  # removed engines that are remembered


class Registry:
    """Adds, monitors and removes engines; tells which are usable now, and for which model.

    Each engine's health is checked every `health_interval_s`. An engine whose address refuses
    connections, that has another model, or that has not answered for `health_timeout_s`, is down
    until it answers again.
    """

    def __init__(
        self,
        config: RouterConfig,
        connect: Callable[[str], EngineCalls],
        tasks: asyncio.TaskGroup,
        events: Events,
        *,
        on_drain: Callable[[Backend], int] = lambda _: 0,
        awake: Callable[[], float] | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """`connect` returns the calls to the engine at a URL: over HTTP, or simulated.

        `on_drain` makes the requests on an engine continue elsewhere; it returns how many. `awake`
        counts the seconds in which this process ran, which are those that an engine can be silent;
        defaults to the event loop's time.
        """
        self._config = config
        self._connect = connect
        self._tasks = tasks
        self._events = events
        self._awake = awake or asyncio.get_running_loop().time
        self._backends: dict[str, Backend] = {}  # by URL
        self._monitors: dict[Backend, asyncio.Task[None]] = {}
        self._turns: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._on_drain = on_drain
        self.prefixes = PrefixIndex(tasks)
        self.lending = Lending(config, self._backends.values, tasks, events, metrics)
        self.ledger, self.rooms = self.lending.ledger, self.lending.rooms
        self._came_up = asyncio.Event()  # set only for a moment, to wake the waiters
        self._adoption = Adoption(self._backends.values, config.health_timeout_s)
        self._removed: dict[str, None] = {}  # URLs of engines that an administrator removed

    def __iter__(self) -> Iterator[Backend]:
        return iter(self._backends.values())

    def __getitem__(self, id: str) -> Backend:
        """Return the engine with this id. Raises `NotFound`."""
        for backend in self:
            if backend.id == id:
                return backend
        raise NotFound(f"no engine {id!r}", param="id")

    def add(
        self,
        url: str,
        *,
        id: str = "",
        role: Role | None = None,
        labels: Mapping[str, str] | None = None,
        source: Source = "flag",
    ) -> Backend:
        """Register the engine at `url`, or note a heartbeat of one that is registered.

        An engine that was about to leave stays. `role` and `labels`, if given, replace its own. A
        heartbeat neither replaces those that came from elsewhere, nor brings back an engine that an
        administrator has removed: it raises `Conflict`.
        """
        url, heartbeat = url.rstrip("/"), source in ("heartbeat", "store")
        if source == "heartbeat" and url in self._removed:
            raise Conflict(
                "an administrator removed this engine; a POST without heartbeat brings it back"
            )
        self._removed.pop(url, None)
        backend = self._backends.get(url)
        if backend is None:
            client = self._connect(url)
            backend = self._backends[url] = Backend(client, self._breaker(), id=id, source=source)
            monitor = self._tasks.create_task(self._monitor(backend), name=f"monitor {url}")
            self._monitors[backend] = monitor
        elif source != "store":
            if backend.source == "store":
                backend.source = source  # known at first hand now
            if not backend.usable:
                backend.probe.set()
        backend.leaving = False
        backend.heartbeat = asyncio.get_running_loop().time()
        if role is not None and not backend.role_pinned:
            backend.role, backend.role_pinned = role, not heartbeat
        elif role is not None and not heartbeat:
            backend.role = role
        if labels is not None and (not heartbeat or backend.labels_from in (None, source)):
            backend.labels, backend.labels_from = labels, source
        return backend

    def drain(self, backend: Backend, draining: bool) -> int:
        """Start or end draining an engine; return how many attempts are moved.

        A draining engine gets no new work, and what runs there continues elsewhere if there is
        another engine.
        """
        backend.draining = draining
        return self._empty(backend) if draining else 0

    def remove(self, backend: Backend, *, for_good: bool = False) -> int:
        """Drain it, and forget it once nothing runs there; returns as `drain`.

        `for_good`: its heartbeats do not bring it back.
        """
        if for_good:
            self._removed[backend.url] = None
            if len(self._removed) > MOST_REMOVED:
                del self._removed[next(iter(self._removed))]
        backend.leaving = True
        if backend.load.idle:
            self._forget(backend)
            return 0
        return self._empty(backend)

    def follow(self, entries: Iterable[EngineEntry]) -> None:
        """Make `entries` the engines from the engines file; other sources' engines stay."""
        wanted = {entry.url: entry for entry in entries}
        for backend in list(self):
            if backend.source == "file" and backend.url not in wanted:
                self.remove(backend)
        for url, entry in wanted.items():
            known = self._backends.get(url)
            ours = known is not None and known.labels_from == "file"
            labels = entry.labels if entry.labels or ours else None
            self.add(url, role=entry.role, labels=labels, source="file")

    def usable(
        self, *, without: Collection[Backend] = (), holding: int = 0, filling: int = 0
    ) -> list[Backend]:
        """Return the engines for new work, without those in `without` and those with open breakers.

        Their contexts have room for `holding` tokens. For `filling` tokens they have room in their
        own pools and what they can borrow: now, or else once other contexts have ended. Not empty
        if any such engine is up: neither exclusion may leave a request without an engine.
        """
        up = [backend for backend in self._backends.values() if backend.usable]
        served = self._adoption.served
        if served is not None and holding > served.contexts[0]:
            up = [backend for backend in up if backend.holds(holding)]
        up = self.rooms.narrow(up, filling)
        rested = [backend for backend in up if not backend.breaker.resting] or up
        if not without:
            return rested
        return [backend for backend in rested if backend not in without] or rested

    def shortage(self, holding: int, filling: int) -> str:
        """Say why none is usable for a request, although some are up; arguments as of `usable`."""
        if any(backend.usable and backend.holds(holding) for backend in self):
            return self.rooms.shortage(filling)
        return f"no engine with a context of {holding} tokens is up"

    def ring(self, backend: Backend) -> list[Backend]:
        """Return the other usable engines, beginning with the one after `backend`."""
        backends = list(self)
        at = backends.index(backend) if backend in backends else 0
        return [other for other in backends[at + 1 :] + backends[:at] if other.usable]

    def turn(self, pool: str) -> int:
        """Return the next number of `pool`'s round robin, which all requests share."""
        return next(self._turns[pool])

    @property
    def model(self) -> ServedModel:
        """The served model. Raises `NoEngines` until an engine has answered."""
        if self._adoption.served is None:
            raise NoEngines("no engine has answered yet")
        return self._adoption.served

    def serving(self) -> list[tuple[Backend, ModelInfo]]:
        """Return the engines that have the served model, and their descriptions of it.

        Those that are down count; fingerprint, page size and capabilities may differ.
        """
        return self._adoption.serving()

    async def settled(self, timeout: float) -> None:
        """Wait until no engine is unknown or suspect, at most `timeout` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                for backend in list(self):
                    await backend.settled.wait()

    async def returned(self, timeout: float, *, holding: int = 0) -> None:
        """Wait until an engine is usable that holds so many tokens, at most `timeout` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not self.usable(holding=holding):
                    await self._came_up.wait()

    def set_gauges(self, metrics: Metrics) -> None:
        """Set the metrics of the engines and of the ledger to what they are now."""
        for gauge in (metrics.engine_up, metrics.engine_load, metrics.breaker_state):
            gauge.clear()
        for backend in self:
            metrics.engine_up.labels(backend.id).set(backend.usable)
            metrics.engine_load.labels(backend.id).set(backend.load.weight)
            metrics.breaker_state.labels(backend.id).set(
                BREAKER_STATES.index(backend.breaker.state)
            )
        self.lending.set_gauges(metrics)

    def close(self) -> None:
        """Stop monitoring."""
        for monitor in self._monitors.values():
            monitor.cancel()
        self.prefixes.close()
        self.lending.close()

    def _empty(self, backend: Backend) -> int:
        if not self.usable():
            return 0
        for replica in list(backend.replicas):
            replica.unwanted()
        return self._on_drain(backend)

    def _breaker(self) -> CircuitBreaker:
        config, clock = self._config, asyncio.get_running_loop().time
        return CircuitBreaker(config.breaker_failures, config.breaker_open_s, clock)

    def _forget(self, backend: Backend) -> None:
        self._backends.pop(backend.url, None)
        self.prefixes.forget(backend)
        self.lending.lost(backend)
        backend.client.close()
        self._adoption.note_contexts()
        if monitor := self._monitors.pop(backend, None):
            monitor.cancel()

    async def _monitor(self, backend: Backend) -> None:
        monitor = Monitor(
            backend,
            self._config,
            admit=self._adoption.admit,
            seen=self._seen,
            lost=self._lost,
            awake=self._awake,
        )
        while True:
            pause = await monitor.check()
            backend.settled.set()
            if self._has_left(backend):
                self._forget(backend)
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await backend.probe.wait()

    def _has_left(self, backend: Backend) -> bool:
        """Return whether to forget it.

        That is so once nothing runs on an engine that is leaving. An engine that had announced
        itself, or that another router announces, leaves if it is down and nothing was heard of it
        for `forget_s`.
        """
        if backend.source in ("heartbeat", "store") and backend.status == "down":
            silent = asyncio.get_running_loop().time() - backend.heartbeat
            backend.leaving |= silent > self._config.forget_s
        return backend.leaving and backend.load.idle

    def _lost(self, backend: Backend, reason: str) -> None:
        if backend.status == "down":
            backend.last_error = reason
            return
        log.warning("engine %s is down: %s", backend.id, reason)
        backend.go_down(reason)
        self.lending.lost(backend)
        compare_secrets(self)
        self._events.publish("engine", id=backend.id, status="down", reason=reason)

    def _seen(self, backend: Backend, state: EngineState) -> None:
        came_up = backend.status != "up"
        if backend.named != state.epoch:  # a process keeps its id
            taken = any(other.id == state.engine_id for other in self if other is not backend)
            anonymous = backend.url.endswith(f"//{state.engine_id}")  # it keeps the id given here
            if not taken and not anonymous:
                backend.id, backend.named = EngineId(state.engine_id), state.epoch
        known_secret = backend.secret_digest
        if not backend.role_pinned:
            backend.role = state.role
        restarted = backend.state is not None and backend.state.epoch != state.epoch
        if restarted:
            backend.breaker.success()  # another process: earlier failures do not count
            backend.lose_replicas("restarted")
        backend.load.hear(state.queued_tokens, state.generations)
        lends = self.lending.concerns(state) or self.lending.concerns(backend.state)
        refused = self.lending.heard(state, backend.state)
        if refused and refused != backend.refused_heartbeat:
            log.warning("engine %s: %s", backend.id, refused)
        backend.refused_heartbeat = refused
        backend.state = state
        backend.status = "up"
        backend.last_error = ""
        if came_up or restarted or lends:  # this looks at all engines
            self.lending.changed()
        if came_up or state.secret_digest != known_secret:
            compare_secrets(self)
        if came_up:
            self._came_up.set()
            self._came_up.clear()
            log.info("engine %s is up at %s", backend.id, backend.url)
            self._events.publish("engine", id=backend.id, status="up", url=backend.url)

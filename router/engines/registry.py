"""The engines that this router knows, each monitored by a task of its own."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress

from engine.protocol import EngineState, MicroserveError, ModelInfo, Timeout
from router.base import Conflict, EngineId, NobodyListens, NoEngines, NotFound, RouterConfig
from router.engines.api import EngineCalls
from router.engines.backend import Backend, Role, Source
from router.engines.circuit_breaker import BREAKER_STATES, CircuitBreaker
from router.engines.engines_file import EngineEntry
from router.engines.prefix_index import PrefixIndex
from router.model import ServedModel
from router.telemetry import Events, Metrics

__all__ = ["Registry"]

log = logging.getLogger(__name__)

LATE_S = 0.5  # a deadline that fires this late was missed by this process, not by the engine
MODEL_S = 10.0  # a tokenizer may have megabytes
RECHECK_S = 0.05  # pause after a failed health check, until the silence is long enough


class Registry:
    """Adds, monitors and removes engines; tells which are usable now, and for which model.

    Each engine's health is checked every `health_interval_s`. An engine whose address refuses
    connections, or that has not answered for `health_timeout_s`, is down until it answers again.
    """

    def __init__(
        self,
        config: RouterConfig,
        connect: Callable[[str], EngineCalls],
        tasks: asyncio.TaskGroup,
        events: Events,
        *,
        on_drain: Callable[[Backend], int] = lambda _: 0,
    ) -> None:
        """`connect` returns the calls to the engine at a URL: over HTTP, or simulated.

        `on_drain` makes the requests on an engine continue elsewhere; it returns how many.
        """
        self._config = config
        self._connect = connect
        self._tasks = tasks
        self._events = events
        self._backends: dict[str, Backend] = {}  # by URL
        self._monitors: dict[Backend, asyncio.Task[None]] = {}
        self._turns: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._on_drain = on_drain
        self.prefixes = PrefixIndex(tasks)
        self._model: ServedModel | None = None
        self._came_up = asyncio.Event()  # set only for a moment, to wake the waiters
        self._adopting = (
            asyncio.Lock()
        )  # if two engines have different models, the first one counts

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

        An engine that was about to leave stays. `labels`, if given, replace its labels.
        """
        url = url.rstrip("/")
        backend = self._backends.get(url)
        if backend is None:
            client = self._connect(url)
            backend = self._backends[url] = Backend(client, self._breaker(), id=id, source=source)
            backend.role = role or "any"
            monitor = self._tasks.create_task(self._monitor(backend), name=f"monitor {url}")
            self._monitors[backend] = monitor
        elif not backend.usable:
            backend.probe.set()
        backend.leaving = False
        backend.heartbeat = asyncio.get_running_loop().time()
        if labels is not None:
            backend.labels = labels
        return backend

    def drain(self, backend: Backend, draining: bool) -> int:
        """Start or end draining an engine; return how many attempts are moved.

        A draining engine gets no new work, and what runs there continues elsewhere if there is
        another engine.
        """
        backend.draining = draining
        return self._empty(backend) if draining else 0

    def remove(self, backend: Backend) -> int:
        """Drain it, and forget it once nothing runs there; returns as `drain`."""
        backend.leaving = True
        backend.probe.set()
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
            backend = self.add(url, role=entry.role, labels=entry.labels, source="file")
            if entry.role is not None:
                backend.role, backend.role_pinned = entry.role, True

    def usable(self, *, without: Collection[Backend] = ()) -> list[Backend]:
        """Return the engines for new work, without those in `without` and those with open breakers.

        Not empty if any engine is up: neither exclusion may leave a request without an engine.
        """
        up = [backend for backend in self if backend.usable]
        rested = [backend for backend in up if not backend.breaker.resting] or up
        return [backend for backend in rested if backend not in without] or rested

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
        if self._model is None:
            raise NoEngines("no engine has answered yet")
        return self._model

    async def settled(self, timeout: float) -> None:
        """Wait until no engine is unknown or suspect, at most `timeout` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                for backend in list(self):
                    await backend.settled.wait()

    async def returned(self, timeout: float) -> None:
        """Wait until an engine is usable, at most `timeout` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not self.usable():
                    await self._came_up.wait()

    def set_gauges(self, metrics: Metrics) -> None:
        """Set the metrics of the engines to what they are now."""
        for gauge in (metrics.engine_up, metrics.engine_load, metrics.breaker_state):
            gauge.clear()
        for backend in self:
            metrics.engine_up.labels(backend.id).set(backend.usable)
            metrics.engine_load.labels(backend.id).set(backend.load.weight)
            metrics.breaker_state.labels(backend.id).set(
                BREAKER_STATES.index(backend.breaker.state)
            )

    def close(self) -> None:
        """Stop monitoring."""
        for monitor in self._monitors.values():
            monitor.cancel()
        self.prefixes.close()

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
        if monitor := self._monitors.pop(backend, None):
            monitor.cancel()

    async def _monitor(self, backend: Backend) -> None:
        config, loop = self._config, asyncio.get_running_loop()
        give_up = loop.time() + config.health_timeout_s
        while True:
            backend.probe.clear()
            try:
                async with asyncio.timeout_at(give_up):
                    await backend.client.health()
                    state = await backend.client.state()
                await self._meet(backend, state)
            except (MicroserveError, TimeoutError) as error:
                now = loop.time()
                if isinstance(error, TimeoutError) and now > give_up + LATE_S:
                    give_up = now + config.health_timeout_s
                    continue  # this router was blocked itself: the answer may have arrived
                gone = isinstance(error, NobodyListens | Conflict) or now >= give_up
                if not gone:
                    await asyncio.sleep(RECHECK_S)
                    continue
                if backend.status != "down":
                    reason = str(error) or f"silent for {config.health_timeout_s:g} s"
                    log.warning("engine %s is down: %s", backend.id, reason)
                    backend.go_down(reason)
                    self._events.publish("engine", id=backend.id, status="down", reason=reason)
            backend.settled.set()
            if self._has_left(backend):
                self._forget(backend)
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(config.health_interval_s):
                    await backend.probe.wait()
            give_up = loop.time() + config.health_timeout_s

    def _has_left(self, backend: Backend) -> bool:
        """Return whether to forget it.

        That is so once nothing runs on an engine that is leaving. An engine that had announced
        itself leaves if it is down and has sent no heartbeat for `forget_s`.
        """
        if backend.source == "heartbeat" and backend.status == "down":
            silent = asyncio.get_running_loop().time() - backend.heartbeat
            backend.leaving |= silent > self._config.forget_s
        return backend.leaving and backend.load.idle

    async def _meet(self, backend: Backend, state: EngineState) -> None:
        """Note the state that an engine reports; fetch the model of a new one."""
        if backend.model is None or backend.state is None or backend.state.epoch != state.epoch:
            try:
                async with asyncio.timeout(MODEL_S):
                    info = await backend.client.model()
            except TimeoutError:
                raise Timeout(f"it did not tell its model within {MODEL_S:g} s") from None
            async with self._adopting:
                await self._adopt(backend, info)
                backend.model = info
        self._seen(backend, state)

    async def _adopt(self, backend: Backend, info: ModelInfo) -> None:
        """Serve the model of `info`.

        Raises `Conflict` if other engines serve another one: KV could not move between them, and
        tokens would depend on the engine.
        """
        served = self._model.info if self._model else None
        if served is not None and served.fingerprint == info.fingerprint:
            return
        in_use = any(
            other.model is not None and other.status != "down"
            for other in self
            if other is not backend
        )
        if served is not None and in_use:
            raise Conflict(f"it serves {info.name}, not the {served.name} served here")
        self._model = await asyncio.to_thread(ServedModel, info)

    def _seen(self, backend: Backend, state: EngineState) -> None:
        came_up = backend.status != "up"
        taken = any(other.id == state.engine_id for other in self if other is not backend)
        if not taken:
            backend.id = EngineId(state.engine_id)
        if not backend.role_pinned:
            backend.role = state.role
        if backend.state is not None and backend.state.epoch != state.epoch:
            backend.breaker.success()  # another process: earlier failures do not count
            backend.lose_replicas("restarted")
        backend.state = state
        backend.status = "up"
        backend.last_error = ""
        if came_up:
            self._came_up.set()
            self._came_up.clear()
            log.info("engine %s is up at %s", backend.id, backend.url)
            self._events.publish("engine", id=backend.id, status="up", url=backend.url)

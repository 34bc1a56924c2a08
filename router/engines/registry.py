"""The engines that this router knows, each watched by a task of its own."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress

from engine.protocol import EngineState, MicroserveError, ModelInfo, Timeout
from router.base.config import RouterConfig
from router.base.errors import Conflict, NobodyListens, NoEngines, NotFound
from router.base.ids import EngineId
from router.engines.api import EngineCalls
from router.engines.backend import Backend, Role, Source
from router.engines.circuit_breaker import BREAKER_STATES, CircuitBreaker
from router.engines.engines_file import EngineEntry
from router.engines.prefix_index import PrefixIndex
from router.model.served import ServedModel
from router.telemetry.events import Events
from router.telemetry.metrics import Metrics

__all__ = ["Registry"]

log = logging.getLogger(__name__)

LATE_S = 0.5  # a deadline that fires so late was missed by this process, not by the engine
MODEL_S = 10.0  # megabytes, perhaps
SECOND_OPINION_S = 0.05  # after an answer that is no good, and before the silence is long enough


class Registry:
    """Adds, watches and removes engines; says which of them can be used now, and for what model.

    An engine is asked for its state every `health_interval_s`. One whose address refuses, or that
    has not answered for `health_timeout_s`, is down until it answers again.
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
        self._came_up = asyncio.Event()  # never set for longer than it takes to wake who waits
        self._adopting = asyncio.Lock()  # of two engines with two models, the first one counts

    def __iter__(self) -> Iterator[Backend]:
        return iter(self._backends.values())

    def __getitem__(self, id: str) -> Backend:
        """Raises `NotFound`."""
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
        """Register the engine at `url`, or hear again of one that is registered (a heartbeat).

        One that was about to leave stays. `labels` replace those it has, where they are given.
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
        """Give it no more work, and have what runs there go on elsewhere, if there is another
        engine; or use it again. Returns how many attempts are moved."""
        backend.draining = draining
        return self._empty(backend) if draining else 0

    def remove(self, backend: Backend) -> int:
        """Drain it, and forget it when what runs there has ended; returns as `drain` does."""
        backend.leaving = True
        backend.probe.set()
        if backend.load.idle:
            self._forget(backend)
            return 0
        return self._empty(backend)

    def follow(self, entries: Iterable[EngineEntry]) -> None:
        """Have just the engines of `entries`, besides those that came from elsewhere."""
        wanted = {entry.url: entry for entry in entries}
        for backend in list(self):
            if backend.source == "file" and backend.url not in wanted:
                self.remove(backend)
        for url, entry in wanted.items():
            backend = self.add(url, role=entry.role, labels=entry.labels, source="file")
            if entry.role is not None:
                backend.role, backend.role_pinned = entry.role, True

    def usable(self, *, without: Collection[Backend] = ()) -> list[Backend]:
        """Engines for new work. Never empty where any is up: neither `without` (engines that have
        failed this request) nor open breakers may leave a request with no engine at all."""
        up = [backend for backend in self if backend.usable]
        rested = [backend for backend in up if not backend.breaker.resting] or up
        return [backend for backend in rested if backend not in without] or rested

    def ring(self, backend: Backend) -> list[Backend]:
        """The other engines that take new work, beginning with the one after `backend`."""
        backends = list(self)
        at = backends.index(backend) if backend in backends else 0
        return [other for other in backends[at + 1 :] + backends[:at] if other.usable]

    def turn(self, pool: str) -> int:
        """The next number of `pool`'s round robin, which all requests share."""
        return next(self._turns[pool])

    @property
    def model(self) -> ServedModel:
        """Raises `NoEngines` as long as no engine has answered."""
        if self._model is None:
            raise NoEngines("no engine has answered yet")
        return self._model

    async def settled(self, timeout: float) -> None:
        """Wait until no engine's status is unknown or suspect, `timeout` seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                for backend in list(self):
                    await backend.settled.wait()

    async def returned(self, timeout: float) -> None:
        """Wait until an engine takes new work, `timeout` seconds at most."""
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
                    continue  # it was this router that stood still: the answer may be here already
                gone = isinstance(error, NobodyListens | Conflict) or now >= give_up
                if not gone:
                    await asyncio.sleep(SECOND_OPINION_S)
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
        """Whether it is to be forgotten: it was to leave and nothing runs there any more, or it
        had announced itself, is down, and has not been heard of for long."""
        if backend.source == "heartbeat" and backend.status == "down":
            silent = asyncio.get_running_loop().time() - backend.heartbeat
            backend.leaving |= silent > self._config.forget_s
        return backend.leaving and backend.load.idle

    async def _meet(self, backend: Backend, state: EngineState) -> None:
        """Note what an engine says of itself; of a new one, learn its model."""
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
        """Serve the model of `info`, unless other engines serve another one.

        Raises `Conflict` then: KV could not travel, and tokens would depend on the engine.
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
            backend.breaker.success()  # another process: what the one before it did is no matter
            backend.lose_replicas("restarted")
        backend.state = state
        backend.status = "up"
        backend.last_error = ""
        if came_up:
            self._came_up.set()
            self._came_up.clear()
            log.info("engine %s is up at %s", backend.id, backend.url)
            self._events.publish("engine", id=backend.id, status="up", url=backend.url)

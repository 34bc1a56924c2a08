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
from router.engines.backend import Member, Role, Source
from router.engines.circuit_breaker import Breaker
from router.engines.engines_file import EngineEntry
from router.engines.prefix_index import Prefixes
from router.execution.moves import Moves
from router.model.served import ServedModel
from router.telemetry.events import Events

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
    ) -> None:
        """`connect` gives the calls to the engine at a URL: over the wire, or simulated."""
        self._config = config
        self._connect = connect
        self._tasks = tasks
        self._events = events
        self._members: dict[str, Member] = {}  # by URL
        self._monitors: dict[Member, asyncio.Task[None]] = {}
        self._turns: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self.moves = Moves()
        self.prefixes = Prefixes(tasks)
        self._model: ServedModel | None = None
        self._came_up = asyncio.Event()  # never set for longer than it takes to wake who waits
        self._adopting = asyncio.Lock()  # of two engines with two models, the first one counts

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __getitem__(self, id: str) -> Member:
        """Raises `NotFound`."""
        for member in self:
            if member.id == id:
                return member
        raise NotFound(f"no engine {id!r}", param="id")

    def add(
        self,
        url: str,
        *,
        id: str = "",
        role: Role | None = None,
        labels: Mapping[str, str] | None = None,
        source: Source = "flag",
    ) -> Member:
        """Register the engine at `url`, or hear again of one that is registered (a heartbeat).

        One that was about to leave stays. `labels` replace those it has, where they are given.
        """
        url = url.rstrip("/")
        member = self._members.get(url)
        if member is None:
            client = self._connect(url)
            member = self._members[url] = Member(client, self._breaker(), id=id, source=source)
            member.role = role or "any"
            monitor = self._tasks.create_task(self._monitor(member), name=f"monitor {url}")
            self._monitors[member] = monitor
        elif not member.usable:
            member.probe.set()
        member.leaving = False
        member.heartbeat = asyncio.get_running_loop().time()
        if labels is not None:
            member.labels = labels
        return member

    def drain(self, member: Member, draining: bool) -> int:
        """Give it no more work, and have what runs there go on elsewhere, if there is another
        engine; or use it again. Returns how many attempts are moved."""
        member.draining = draining
        return self._empty(member) if draining else 0

    def remove(self, member: Member) -> int:
        """Drain it, and forget it when what runs there has ended; returns as `drain` does."""
        member.leaving = True
        member.probe.set()
        if member.load.idle:
            self._forget(member)
            return 0
        return self._empty(member)

    def follow(self, entries: Iterable[EngineEntry]) -> None:
        """Have just the engines of `entries`, besides those that came from elsewhere."""
        wanted = {entry.url: entry for entry in entries}
        for member in list(self):
            if member.source == "file" and member.url not in wanted:
                self.remove(member)
        for url, entry in wanted.items():
            member = self.add(url, role=entry.role, labels=entry.labels, source="file")
            if entry.role is not None:
                member.role, member.role_pinned = entry.role, True

    def usable(self, *, without: Collection[Member] = ()) -> list[Member]:
        """Engines for new work. Never empty where any is up: neither `without` (engines that have
        failed this request) nor open breakers may leave a request with no engine at all."""
        up = [member for member in self if member.usable]
        rested = [member for member in up if not member.breaker.resting] or up
        return [member for member in rested if member not in without] or rested

    def ring(self, member: Member) -> list[Member]:
        """The other engines that take new work, beginning with the one after `member`."""
        members = list(self)
        at = members.index(member) if member in members else 0
        return [other for other in members[at + 1 :] + members[:at] if other.usable]

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
                for member in list(self):
                    await member.asked.wait()

    async def returned(self, timeout: float) -> None:
        """Wait until an engine takes new work, `timeout` seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not self.usable():
                    await self._came_up.wait()

    def close(self) -> None:
        for monitor in self._monitors.values():
            monitor.cancel()
        self.prefixes.close()

    def _empty(self, member: Member) -> int:
        if not self.usable():
            return 0
        for replica in list(member.replicas):
            replica.unwanted()
        return self.moves.leave(member)

    def _breaker(self) -> Breaker:
        config, clock = self._config, asyncio.get_running_loop().time
        return Breaker(config.breaker_failures, config.breaker_open_s, clock)

    def _forget(self, member: Member) -> None:
        self._members.pop(member.url, None)
        self.prefixes.forget(member)
        if monitor := self._monitors.pop(member, None):
            monitor.cancel()

    async def _monitor(self, member: Member) -> None:
        config, loop = self._config, asyncio.get_running_loop()
        give_up = loop.time() + config.health_timeout_s
        while True:
            member.probe.clear()
            try:
                async with asyncio.timeout_at(give_up):
                    await member.client.health()
                    state = await member.client.state()
                await self._meet(member, state)
            except (MicroserveError, TimeoutError) as error:
                now = loop.time()
                if isinstance(error, TimeoutError) and now > give_up + LATE_S:
                    give_up = now + config.health_timeout_s
                    continue  # it was this router that stood still: the answer may be here already
                gone = isinstance(error, NobodyListens | Conflict) or now >= give_up
                if not gone:
                    await asyncio.sleep(SECOND_OPINION_S)
                    continue
                if member.status != "down":
                    reason = str(error) or f"silent for {config.health_timeout_s:g} s"
                    log.warning("engine %s is down: %s", member.id, reason)
                    member.go_down(reason)
                    self._events.publish("engine", id=member.id, status="down", reason=reason)
            member.asked.set()
            if self._has_left(member):
                self._forget(member)
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(config.health_interval_s):
                    await member.probe.wait()
            give_up = loop.time() + config.health_timeout_s

    def _has_left(self, member: Member) -> bool:
        """Whether it is to be forgotten: it was to leave and nothing runs there any more, or it
        had announced itself, is down, and has not been heard of for long."""
        if member.source == "heartbeat" and member.status == "down":
            silent = asyncio.get_running_loop().time() - member.heartbeat
            member.leaving |= silent > self._config.forget_s
        return member.leaving and member.load.idle

    async def _meet(self, member: Member, state: EngineState) -> None:
        """Note what an engine says of itself; of a new one, learn its model."""
        if member.model is None or member.state is None or member.state.epoch != state.epoch:
            try:
                async with asyncio.timeout(MODEL_S):
                    info = await member.client.model()
            except TimeoutError:
                raise Timeout(f"it did not tell its model within {MODEL_S:g} s") from None
            async with self._adopting:
                await self._adopt(member, info)
                member.model = info
        self._seen(member, state)

    async def _adopt(self, member: Member, info: ModelInfo) -> None:
        """Serve the model of `info`, unless other engines serve another one.

        Raises `Conflict` then: KV could not travel, and tokens would depend on the engine.
        """
        served = self._model.info if self._model else None
        if served is not None and served.fingerprint == info.fingerprint:
            return
        in_use = any(
            other.model is not None and other.status != "down"
            for other in self
            if other is not member
        )
        if served is not None and in_use:
            raise Conflict(f"it serves {info.name}, not the {served.name} served here")
        self._model = await asyncio.to_thread(ServedModel, info)

    def _seen(self, member: Member, state: EngineState) -> None:
        came_up = member.status != "up"
        taken = any(other.id == state.engine_id for other in self if other is not member)
        if not taken:
            member.id = EngineId(state.engine_id)
        if not member.role_pinned:
            member.role = state.role
        if member.state is not None and member.state.epoch != state.epoch:
            member.breaker.success()  # another process: what the one before it did is no matter
            member.lose_replicas("restarted")
        member.state = state
        member.status = "up"
        member.last_error = ""
        if came_up:
            self._came_up.set()
            self._came_up.clear()
            log.info("engine %s is up at %s", member.id, member.url)
            self._events.publish("engine", id=member.id, status="up", url=member.url)

"""The engines that this router knows, each watched by a task of its own."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress

from engine.protocol import EngineState, MicroserveError, ModelInfo
from router.config import RouterConfig
from router.engine_client import EngineClient
from router.errors import Conflict, NobodyListens, NoEngines, NotFound
from router.ids import EngineId
from router.member import Member, Role
from router.model import ServedModel

__all__ = ["Registry"]

log = logging.getLogger(__name__)


class Registry:
    """Adds, watches and removes engines; says which of them can be used now, and for what model.

    An engine is asked for its state every `health_interval_s`. One whose address refuses, or that
    stays silent for `health_failures` polls, is down until it answers again.
    """

    def __init__(
        self,
        config: RouterConfig,
        connect: Callable[[str], EngineClient],
        tasks: asyncio.TaskGroup,
    ) -> None:
        """`connect` gives the calls to the engine at a URL."""
        self._config = config
        self._connect = connect
        self._tasks = tasks
        self._members: dict[str, Member] = {}  # by URL
        self._monitors: dict[str, asyncio.Task[None]] = {}
        self._turns: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._model: ServedModel | None = None
        self._adopting = asyncio.Lock()  # of two engines with two models, the first one counts

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __getitem__(self, id: str) -> Member:
        """Raises `NotFound`."""
        for member in self:
            if member.id == id:
                return member
        raise NotFound(f"no engine {id!r}", param="id")

    def add(self, url: str, *, id: str = "", role: Role | None = None) -> Member:
        """Register the engine at `url`, or hear again of one that is registered (a heartbeat)."""
        client = self._connect(url)
        member = self._members.get(client.url)
        if member is None:
            member = self._members[client.url] = Member(client, id=id, role=role or "any")
            monitor = self._tasks.create_task(self._monitor(member), name=f"monitor {client.url}")
            self._monitors[client.url] = monitor
        elif not member.usable:
            member.probe.set()
        return member

    def remove(self, member: Member) -> None:
        """Give it no more work. What runs on it goes on."""
        self._members.pop(member.url, None)
        if monitor := self._monitors.pop(member.url, None):
            monitor.cancel()

    def usable(self, *, without: Collection[Member] = ()) -> list[Member]:
        """Engines for new work. Never empty where any is up: neither `without` (engines that have
        failed this request) nor open breakers may leave a request with no engine at all."""
        up = [member for member in self if member.usable]
        rested = [member for member in up if not member.resting] or up
        return [member for member in rested if member not in without] or rested

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

    def close(self) -> None:
        for monitor in self._monitors.values():
            monitor.cancel()

    async def _monitor(self, member: Member) -> None:
        silent = 0
        while True:
            member.probe.clear()
            try:
                await self._poll(member)
                silent = 0
            except (MicroserveError, TimeoutError) as error:
                silent += 1
                gone = isinstance(error, NobodyListens) or silent >= self._config.health_failures
                if gone and member.status != "down":
                    reason = str(error) or "it is silent"
                    log.warning("engine %s is down: %s", member.id, reason)
                    member.go_down(reason)
                if not gone:
                    continue  # a second opinion at once: a poll that timed out took long enough
            member.asked.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.health_interval_s):
                    await member.probe.wait()

    async def _poll(self, member: Member) -> None:
        async with asyncio.timeout(self._config.health_timeout_s):
            await member.client.health()
            state = await member.client.state()
        if member.model is None or member.state is None or member.state.epoch != state.epoch:
            async with asyncio.timeout(self._config.health_timeout_s * 5):  # megabytes, perhaps
                info = await member.client.model()
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
        if member.status != "up":
            log.info("engine %s is up at %s", state.engine_id, member.url)
        taken = any(other.id == state.engine_id for other in self if other is not member)
        if not taken:
            member.id = EngineId(state.engine_id)
        if not member.role_pinned:
            member.role = state.role
        member.state = state
        member.status = "up"
        member.last_error = ""

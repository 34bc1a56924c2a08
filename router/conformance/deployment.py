"""A router process with a strategy in front of engines, and faults to inject there."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from engine.protocol import EngineState
from router.conformance.engine_process import EngineProcess, start_program
from router.conformance.forkserver import ForkedProcess, run_microserve
from router.conformance.proxy import HoldPoint, Moment

__all__ = ["Deployment", "deployed"]

SETTLE_S = 15.0  # sharing between choices lasts 5 s at most; a lost lease would last 30 s
UP_S = 30.0
REQUEST_S = 150.0  # more than the router's own --request-timeout
POLL_S = 0.02
VIOLATION = re.compile(r"strategy \S+ \(generation .*")  # in the router's log
# Dead engines and hanging strategies are noticed soon, and each token is an event of its own. The
# health timeout is long, so that engines do not count as down on a busy machine.
FLAGS = (
    "--port", "0", "--health-interval", "0.1", "--health-timeout", "15", "--stall", "5",
    "--grace", "1", "--request-timeout", "120", "--stream-interval-ms", "0",
)  # fmt: skip


@dataclass(slots=True)
class Deployment:
    """A router process at `url` with a strategy, and its engines. `label` names the strategy."""

    label: str
    http: httpx.AsyncClient
    engines: list[EngineProcess]
    router: ForkedProcess
    url: str
    resumes: bool = True  # engines continue sampled and penalised outputs of others exactly
    _dead: list[EngineProcess] = field(default_factory=list)

    @property
    def violation(self) -> str:
        """The last violation by the strategy that the router logged."""
        said = VIOLATION.findall(self.router.log)
        return said[-1] if said else ""

    def hold(self, moment: Moment, number: int) -> HoldPoint:
        """Set a hold point in all proxies, replacing the previous one."""
        hold_point = HoldPoint(moment, number)
        for engine in self.engines:
            engine.proxy.hold_point = hold_point
        return hold_point

    def release(self) -> None:
        """Remove the hold point and let the held call proceed."""
        for engine in self.engines:
            if engine.proxy.hold_point is not None:
                engine.proxy.hold_point.released.set()
            engine.proxy.hold_point = None

    async def kill(self, name: str) -> None:
        """Send SIGKILL to the engine. `revive` restarts it."""
        engine = next(engine for engine in self.engines if engine.name == name)
        self._dead.append(engine)
        await engine.die()

    async def revive(self) -> None:
        """Restart killed engines and wait until the router uses them. Raises `TimeoutError`."""
        while self._dead:
            await self._dead[-1].start()
            await self.until_up(self._dead.pop())

    async def until_up(self, engine: EngineProcess) -> None:
        """Wait until the router uses the current process of `engine`. Raises `TimeoutError`."""
        epoch = (await self.state(engine)).epoch
        async with asyncio.timeout(UP_S):
            while not await self._knows(engine.name, epoch):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)

    async def _knows(self, name: str, epoch: int) -> bool:
        return any(
            backend["id"] == name and backend["status"] == "up" and backend["epoch"] == epoch
            for backend in (await self.admin("GET", "engines"))["engines"]
        )

    async def admin(self, method: str, path: str, body: Any = None) -> Any:
        """Call the router's admin API. Raises `httpx.HTTPError`."""
        reply = await self.http.request(method, f"{self.url}/admin/{path}", json=body)
        reply.raise_for_status()
        return reply.json()

    async def state(self, engine: EngineProcess) -> EngineState:
        reply = await self.http.get(f"{engine.url}/microserving/state")
        return EngineState.model_validate_json(reply.content)

    async def left_over(self) -> str:
        """Describe what is left over `SETTLE_S` after the last request; empty: nothing."""
        give_up = asyncio.get_running_loop().time() + SETTLE_S
        while left := await self._busy():
            if asyncio.get_running_loop().time() > give_up:
                return left
            await asyncio.sleep(POLL_S)
        for engine in self.engines:
            reply = await self.http.get(f"{engine.url}/microserving/integrity")
            if reply.status_code != 200:
                return f"{engine.name}: its page bookkeeping is inconsistent: {reply.text[:200]}"
        return ""

    async def _busy(self) -> str:
        for backend in (await self.admin("GET", "engines"))["engines"]:
            if any(backend["load"].values()):
                return f"the router counts load on {backend['id']}: {backend['load']}"
        for engine in self.engines:
            state = await self.state(engine)
            pages = state.pages
            if state.leases:
                return f"a lease on {engine.name}"
            if state.running or state.waiting or state.puts_in_flight:
                return f"work on {engine.name}"
            if lost := pages.total - pages.free - pages.cached:
                return f"{lost} pages on {engine.name} that are neither free nor cached"
        return ""


@asynccontextmanager
async def deployed(
    engines: Sequence[EngineProcess], strategy: str, params: Mapping[str, Any] | None = None
) -> AsyncIterator[Deployment]:
    """Start a router in front of `engines` with a strategy, given by name or file.

    It ends with the body, and also if this process is killed. Raises `StartFailed`.
    """
    chosen = [f"{name}={json.dumps(value)}" for name, value in (params or {}).items()]
    flags = [*FLAGS, "--parent-pid", str(os.getpid()), "--strategy", strategy]
    flags += [part for engine in engines for part in ("--engine", engine.proxy.url)]
    flags += [part for param in chosen for part in ("--param", param)]
    router, url = await start_program(run_microserve, "router", *flags)
    try:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=REQUEST_S, limits=limits, trust_env=False) as http:
            label = " ".join((Path(strategy).stem, *chosen))
            deployment = Deployment(label, http, list(engines), router, url)
            for engine in engines:
                await deployment.until_up(engine)
            listed = (await deployment.admin("GET", "engines"))["engines"]
            deployment.resumes = all("resume" in backend["capabilities"] for backend in listed)
            yield deployment
    finally:
        router.kill()

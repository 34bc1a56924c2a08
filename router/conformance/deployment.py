"""A router process with a strategy, before engines; and what can be done to them."""

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
from router.conformance.engine_process import EngineProcess, started
from router.conformance.forkserver import Forked, microserve
from router.conformance.proxy import Gate, Moment

__all__ = ["Deployment", "routed"]

REST_S = 15.0  # until nothing is left: what a choice keeps for others goes after 5 s, a lease 30 s
UP_S = 30.0
ASK_S = 150.0  # any request; the router gives up before
LOOK_S = 0.02
OFFENCE = re.compile(r"strategy \S+ \(generation .*")  # in the router's log
# Deaths are noticed soon, a strategy that hangs is too, and each token is an event of its own. A
# crowded machine is no reason to give an engine up.
FLAGS = (
    "--port", "0", "--health-interval", "0.1", "--health-timeout", "15", "--stall", "5",
    "--grace", "1", "--request-timeout", "120", "--stream-interval-ms", "0",
)  # fmt: skip


@dataclass(slots=True)
class Deployment:
    """A router process at `url` with a strategy, and its engines. `label` tells it from others."""

    label: str
    http: httpx.AsyncClient
    nodes: list[EngineProcess]
    router: Forked
    url: str
    _dead: list[EngineProcess] = field(default_factory=list)

    @property
    def violation(self) -> str:
        """What the router said last of its strategy."""
        said = OFFENCE.findall(self.router.log)
        return said[-1] if said else ""

    def hold(self, moment: Moment, number: int) -> Gate:
        """A gate before all engines, in place of the one before it."""
        gate = Gate(moment, number)
        for node in self.nodes:
            node.proxy.gate = gate
        return gate

    def let_pass(self) -> None:
        """No gate any longer."""
        for node in self.nodes:
            if node.proxy.gate is not None:
                node.proxy.gate.opened.set()
            node.proxy.gate = None

    async def kill(self, name: str) -> None:
        """SIGKILL the engine; `revive` starts it again."""
        node = next(node for node in self.nodes if node.name == name)
        self._dead.append(node)
        await node.die()

    async def revive(self) -> None:
        """Start again what was killed; returns when the router uses it. Raises `TimeoutError`."""
        while self._dead:
            await self._dead[-1].start()
            await self.until_up(self._dead.pop())

    async def until_up(self, node: EngineProcess) -> None:
        """Wait until the router uses this process of `node`. Raises `TimeoutError`."""
        epoch = (await self.state(node)).epoch
        async with asyncio.timeout(UP_S):
            while not await self._knows(node.name, epoch):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)

    async def _knows(self, name: str, epoch: int) -> bool:
        return any(
            backend["id"] == name and backend["status"] == "up" and backend["epoch"] == epoch
            for backend in (await self.admin("GET", "engines"))["engines"]
        )

    async def admin(self, method: str, path: str, body: Any = None) -> Any:
        """A call to the router's admin API that must succeed."""
        reply = await self.http.request(method, f"{self.url}/admin/{path}", json=body)
        reply.raise_for_status()
        return reply.json()

    async def state(self, node: EngineProcess) -> EngineState:
        reply = await self.http.get(f"{node.url}/microserving/state")
        return EngineState.model_validate_json(reply.content)

    async def left_over(self) -> str:
        """What is still there `REST_S` after the last request, for people; empty: nothing."""
        give_up = asyncio.get_running_loop().time() + REST_S
        while left := await self._busy():
            if asyncio.get_running_loop().time() > give_up:
                return left
            await asyncio.sleep(LOOK_S)
        for node in self.nodes:
            reply = await self.http.get(f"{node.url}/microserving/integrity")
            if reply.status_code != 200:
                return f"{node.name}: its books are wrong: {reply.text[:200]}"
        return ""

    async def _busy(self) -> str:
        for backend in (await self.admin("GET", "engines"))["engines"]:
            if any(backend["load"].values()):
                return f"the router counts load on {backend['id']}: {backend['load']}"
        for node in self.nodes:
            state = await self.state(node)
            pages = state.pages
            if state.leases:
                return f"a lease on {node.name}"
            if state.running or state.waiting or state.puts_in_flight:
                return f"work on {node.name}"
            if lost := pages.total - pages.free - pages.cached:
                return f"{lost} pages on {node.name} that are neither free nor cached"
        return ""


@asynccontextmanager
async def routed(
    nodes: Sequence[EngineProcess], strategy: str, params: Mapping[str, Any] | None = None
) -> AsyncIterator[Deployment]:
    """A router before `nodes` with a strategy, a name or a file's path, while the body runs.

    It ends with this process, whatever becomes of that. Raises `StartFailed`.
    """
    chosen = [f"{name}={json.dumps(value)}" for name, value in (params or {}).items()]
    flags = [*FLAGS, "--parent-pid", str(os.getpid()), "--strategy", strategy]
    flags += [part for node in nodes for part in ("--engine", node.proxy.url)]
    flags += [part for param in chosen for part in ("--param", param)]
    router, url = await started(microserve, "router", *flags)
    try:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=ASK_S, limits=limits, trust_env=False) as http:
            label = " ".join((Path(strategy).stem, *chosen))
            deployment = Deployment(label, http, list(nodes), router, url)
            for node in nodes:
                await deployment.until_up(node)
            yield deployment
    finally:
        router.kill()

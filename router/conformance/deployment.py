"""What strategies are held against: three engines behind a router, and a fourth with a router of
its own, the oracle. All are processes; they end with this one, whatever becomes of it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from engine.protocol import EngineState
from router.conformance.forked import Forked, Program, engine, microserve
from router.conformance.proxy import Gate, Moment, Proxy

__all__ = ["Deployment", "Node", "deployed"]

ENGINES = 3
REST_S = (
    15.0  # until nothing is left; what one choice keeps for others goes after 5 s, a lease 30 s
)
UP_S = 30.0
ASK_S = 150.0  # any request; the router gives up before
LOOK_S = 0.01
ENGINE_FLAGS = ("--port", "0", "--threads", "1", "--dtype", "float32", "--pool-pages", "512")
# Deaths are noticed soon, a strategy that hangs is too, and each token is an event of its own.
ROUTER_FLAGS = (
    "--port", "0", "--health-interval", "0.1", "--stall", "5", "--grace", "1",
    "--request-timeout", "120", "--stream-interval-ms", "0",
)  # fmt: skip


class Node:
    """One engine behind its proxy; it can die, and another process takes its place."""

    def __init__(self, name: str, model: str, secret: str) -> None:
        self.name = name
        self.proxy = Proxy(name)
        self.url = ""  # the engine's own
        self._flags = (model, *ENGINE_FLAGS, "--engine-id", name)
        self._secret = secret
        self._process: Forked | None = None

    async def start(self) -> None:
        """Returns when it listens. Raises `StartFailed`."""
        self._process, self.url = await _started(engine, *self._flags, secret=self._secret)
        await self.proxy.open(int(self.url.rpartition(":")[2]))

    async def die(self) -> None:
        """SIGKILL: when this returns, the process is gone and its address refuses."""
        if self._process is not None:
            await asyncio.to_thread(self._process.signal, signal.SIGKILL)
            self._process.kill()
        await self.proxy.close()

    async def stop(self) -> None:
        """End it. Idempotent."""
        await self.proxy.close()
        if self._process is not None:
            self._process.kill()


@dataclass(slots=True)
class Deployment:
    """Running. `url` is the router's with the strategy, `oracle` that of one engine alone."""

    session: aiohttp.ClientSession
    nodes: list[Node]
    router: Forked
    url: str
    oracle: str
    vocabulary: int
    _dead: list[Node] = field(default_factory=list)

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

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
        node = self.node(name)
        self._dead.append(node)
        await node.die()

    async def revive(self) -> None:
        """Start again what was killed; returns when the router uses it. Raises `TimeoutError`."""
        while self._dead:
            await self._dead[-1].start()
            self._dead.pop()
        async with asyncio.timeout(UP_S):
            while not all([await self._up(node) for node in self.nodes]):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)

    async def admin(self, method: str, path: str, body: Any = None) -> Any:
        """A call to the router's admin API that must succeed."""
        async with self.session.request(method, f"{self.url}/admin/{path}", json=body) as reply:
            reply.raise_for_status()
            return orjson.loads(await reply.read())

    async def left_over(self) -> str:
        """What is still there `REST_S` after the last request, for people; empty: nothing."""
        give_up = asyncio.get_running_loop().time() + REST_S
        while left := await self._busy():
            if asyncio.get_running_loop().time() > give_up:
                return left
            await asyncio.sleep(LOOK_S)
        for node in self.nodes:
            async with self.session.get(f"{node.url}/microserving/integrity") as reply:
                if reply.status != 200:
                    return f"{node.name}: its books are wrong: {(await reply.text())[:200]}"
        return ""

    async def _busy(self) -> str:
        for member in (await self.admin("GET", "engines"))["engines"]:
            if any(member["load"].values()):
                return f"the router counts load on {member['id']}: {member['load']}"
        for node in self.nodes:
            state = await self._state(node)
            pages = state.pages
            if state.leases:
                return f"a lease on {node.name}"
            if state.running or state.waiting or state.puts_in_flight:
                return f"work on {node.name}"
            if lost := pages.total - pages.free - pages.cached:
                return f"{lost} pages on {node.name} that are neither free nor cached"
        return ""

    async def _up(self, node: Node) -> bool:
        epoch = (await self._state(node)).epoch
        members = (await self.admin("GET", "engines"))["engines"]
        return any(
            member["id"] == node.name and member["status"] == "up" and member["epoch"] == epoch
            for member in members
        )

    async def _state(self, node: Node) -> EngineState:
        async with self.session.get(f"{node.url}/microserving/state") as reply:
            return EngineState.model_validate_json(await reply.read())


@asynccontextmanager
async def deployed(
    model: str, strategy: str, params: Mapping[str, Any] | None = None
) -> AsyncIterator[Deployment]:
    """A deployment with `strategy`, a name or a file's path. Raises `StartFailed`."""
    secret = secrets.token_hex(32)
    nodes = [Node(f"engine-{number}", model, secret) for number in range(ENGINES)]
    alone = Node("oracle", model, secret)
    routers: list[Forked] = []

    async def route(strategy: str, params: Mapping[str, Any], *fleet: Node) -> str:
        flags = [part for node in fleet for part in ("--engine", node.proxy.url)]
        for name, value in params.items():
            flags += ["--param", f"{name}={json.dumps(value)}"]
        flags += [*ROUTER_FLAGS, "--parent-pid", str(os.getpid()), "--strategy", strategy]
        router, url = await _started(microserve, "router", *flags, secret=secret)
        routers.append(router)
        return url

    try:
        async with asyncio.TaskGroup() as starts:
            for node in (*nodes, alone):
                starts.create_task(node.start())
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ASK_S)) as session:
            url = await route(strategy, params or {}, *nodes)
            oracle = await route("data_parallel", {}, alone)
            async with session.get(f"{alone.url}/microserving/model") as reply:
                vocabulary = orjson.loads(await reply.read())["vocab_size"]
            deployment = Deployment(session, nodes, routers[0], url, oracle, vocabulary)
            await deployment.revive()
            yield deployment
    finally:
        for router in routers:
            router.kill()
        for node in (*nodes, alone):
            await node.stop()


async def _started(program: Program, *flags: str, secret: str) -> tuple[Forked, str]:
    """The process, once it has said that it is ready, and its URL. Raises `StartFailed`."""
    process = await asyncio.to_thread(Forked, program, *flags, MICROSERVE_SECRET=secret)
    try:
        return process, (await asyncio.to_thread(process.line)).split()[-1]
    except BaseException:
        process.kill()
        raise

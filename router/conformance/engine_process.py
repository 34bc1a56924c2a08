"""An engine process that can die, behind a proxy whose address stays."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from router.conformance.forkserver import Forked, Program, engine
from router.conformance.proxy import Proxy

__all__ = ["EngineProcess", "engines", "started"]

FLAGS = ("--port", "0", "--threads", "1", "--dtype", "float32", "--pool-pages", "512")


class EngineProcess:
    """One engine behind its proxy; it can die, and another process takes its place."""

    def __init__(self, name: str, model: str, secret: str) -> None:
        self.name = name
        self.proxy = Proxy(name)
        self.url = ""  # the engine's own
        self._flags = (model, *FLAGS, "--engine-id", name)
        self._secret = secret
        self._process: Forked | None = None

    async def start(self) -> None:
        """Returns when it listens. Raises `StartFailed`."""
        self._process, self.url = await started(
            engine, *self._flags, MICROSERVE_SECRET=self._secret
        )
        self.proxy.open(int(self.url.rpartition(":")[2]))

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


@asynccontextmanager
async def engines(model: str, count: int) -> AsyncIterator[list[EngineProcess]]:
    """So many engines, which share a secret, while the body runs. Raises `StartFailed`."""
    secret = secrets.token_hex(32)
    nodes = [EngineProcess(f"engine-{number}", model, secret) for number in range(count)]
    try:
        async with asyncio.TaskGroup() as starts:
            for node in nodes:
                starts.create_task(node.start())
        yield nodes
    finally:
        for node in nodes:
            await node.stop()


async def started(program: Program, *flags: str, **environment: str) -> tuple[Forked, str]:
    """The process, once it has said that it is ready, and its URL. Raises `StartFailed`."""
    process = await asyncio.to_thread(Forked, program, *flags, **environment)
    try:
        return process, (await asyncio.to_thread(process.line)).split()[-1]
    except BaseException:
        process.kill()
        raise

"""Engine processes behind proxies, which can be killed and restarted at the same address."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import chain, repeat
from typing import Literal

from router.conformance.forkserver import ForkedProcess, Program, run_engine
from router.conformance.proxy import Proxy

__all__ = ["Backend", "EngineProcess", "running_engines", "start_program"]

Backend = Literal["microserve", "vllm"]
VLLM = ("--backend", "vllm", "--vllm-args=--enforce-eager --block-size 32")
FLAGS = ("--port", "0", "--threads", "1", "--dtype", "float32", "--pool-pages", "512")


class EngineProcess:
    """One engine behind its proxy. Another process can replace it after `die`."""

    def __init__(
        self, name: str, model: str, secret: str, backend: Backend, flags: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.flags = flags  # beyond those of all engines
        self.proxy = Proxy(name)
        self.url = ""  # the engine's own, not the proxy's
        more = VLLM if backend == "vllm" else ()
        self._all_flags = (model, *FLAGS, *flags, "--engine-id", name, *more)
        self._secret = secret
        self._process: ForkedProcess | None = None

    async def start(self) -> None:
        """Start the engine and wait until it listens. Raises `StartFailed`."""
        self._process, self.url = await start_program(
            run_engine, *self._all_flags, MICROSERVE_SECRET=self._secret
        )
        self.proxy.open(int(self.url.rpartition(":")[2]))

    async def die(self) -> None:
        """Send SIGKILL. On return the process is gone and the proxy refuses connections."""
        if self._process is not None:
            await asyncio.to_thread(self._process.signal, signal.SIGKILL)
            self._process.kill()
        await self.proxy.close()

    async def stop(self) -> None:
        """Kill the engine and close the proxy. Idempotent."""
        await self.proxy.close()
        if self._process is not None:
            self._process.kill()


@asynccontextmanager
async def running_engines(
    model: str,
    count: int,
    backend: Backend = "microserve",
    flags: Sequence[Sequence[str]] = (),
) -> AsyncIterator[list[EngineProcess]]:
    """Start engines that share a secret; they end with the body. Raises `StartFailed`.

    `flags` are further flags of the first ones, for each of these.
    """
    secret = secrets.token_hex(32)
    engines = [
        EngineProcess(f"engine-{number}", model, secret, backend, own)
        for number, own in zip(range(count), chain(flags, repeat(())), strict=False)
    ]
    try:
        async with asyncio.TaskGroup() as starts:
            for engine in engines:
                starts.create_task(engine.start())
        yield engines
    finally:
        for engine in engines:
            await engine.stop()


async def start_program(
    program: Program, *flags: str, **environment: str
) -> tuple[ForkedProcess, str]:
    """Start a process and wait until it is ready. Return it and its URL. Raises `StartFailed`."""
    process = await asyncio.to_thread(ForkedProcess, program, *flags, **environment)
    try:
        return process, (await asyncio.to_thread(process.line)).split()[-1]
    except BaseException:
        process.kill()
        raise

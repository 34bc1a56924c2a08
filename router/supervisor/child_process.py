"""Starts and reliably ends the child processes of `microserve up`."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress

from router.base import StartFailed

__all__ = ["GRACE_S", "ChildProcess"]

TAIL_LINES = 20
GRACE_S = 6.0
READY = re.compile(r"(?:router|engine \S+) ready (https?://\S+)")


class ChildProcess:
    """One process that leads a session of its own.

    Ctrl-C in a terminal reaches only `up`, which then ends its children in order; a child's own
    children end with it. A line on the child's standard output says that it is ready and ends with
    its URL. All other lines, and its standard error, go to `to`, each prefixed with its name.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        to: Callable[[str], None],
        grace_s: float = GRACE_S,
    ) -> None:
        """`grace_s` is how long it may take to end after SIGTERM."""
        self.name = name
        self.argv = list(argv)
        self.url = ""
        self._env = dict(env)
        self._say = to
        self._grace_s = grace_s
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._output: asyncio.Task[None] | None = None
        self._ready = False

    @property
    def ready(self) -> bool:
        """Whether its process, which has not ended, has announced its URL."""
        return self._ready and self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start the process and wait until it is ready. A task in `tasks` reads its output.

        Raises `StartFailed`.
        """
        self._tail.clear()
        self._ready = False
        self._process = await asyncio.create_subprocess_exec(
            *self.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._env,
            start_new_session=True,
        )
        ready = asyncio.Event()
        self._output = tasks.create_task(self._read(self._process, ready))
        await ready.wait()
        if not self.url:
            await self.wait()
            tail = "\n".join(self._tail)
            raise StartFailed(f"{self.name} failed to start ({self.ending()})\n{tail}".rstrip())
        self._ready = True

    async def wait(self) -> None:
        """Wait until it has ended and its output has been read."""
        if self._process is not None and self._output is not None:
            await self._process.wait()
            self.signal(signal.SIGKILL)  # its own children may hold its pipes
            await asyncio.shield(self._output)

    def ending(self) -> str:
        """Describe how it ended."""
        code = self._process.returncode if self._process else None
        if code is None:
            return "running"
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its session, if any process is left there."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after `grace_s`. SIGCONT wakes a process that was stopped."""
        if self._process is None:
            return
        if self._process.returncode is None:
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._grace_s):
                    await self._process.wait()
        self.signal(signal.SIGKILL)
        await self.wait()

    async def _read(self, process: asyncio.subprocess.Process, ready: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as readers:
                readers.create_task(self._read_errors(process.stderr))
                async for line in _lines(process.stdout):
                    announced = None if ready.is_set() else READY.fullmatch(line)
                    if announced is None:
                        self._say(f"{self.name} | {line}")
                        continue
                    self.url = announced[1]
                    ready.set()
        finally:
            if not ready.is_set():
                self.url = ""
                ready.set()

    async def _read_errors(self, stream: asyncio.StreamReader | None) -> None:
        async for line in _lines(stream):
            self._tail.append(line)
            self._say(f"{self.name} | {line}")


async def _lines(stream: asyncio.StreamReader | None) -> AsyncIterator[str]:
    """Yield the lines of a pipe. `…` stands for parts of lines above asyncio's buffer limit."""
    while stream is not None:
        try:
            line = await stream.readline()
        except ValueError:
            yield "…"
            continue
        if not line:
            return
        yield line.decode(errors="replace").rstrip()

"""Child processes of `microserve up`: started, awaited, and ended for certain."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from router.base.errors import StartFailed

__all__ = ["Child"]

TAIL_LINES = 20
GRACE_S = 6.0


class Child:
    """One process, the leader of a session of its own: Ctrl-C in a terminal reaches only `up`,
    which then ends its children in order, and whatever a child has started goes with it.

    Its first line on standard output says that it is ready and ends in its URL. Its standard error
    goes to ours, each line with its name before it.
    """

    def __init__(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], *, to: Callable[[str], None]
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self.url = ""
        self._env = dict(env)
        self._say = to
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._output: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start, and wait until it is ready. Raises `StartFailed`; `tasks` reads its output."""
        self._tail.clear()
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

    async def wait(self) -> None:
        """Until it has ended and all it said has been read."""
        if self._process is not None and self._output is not None:
            await self._process.wait()
            self.signal(signal.SIGKILL)  # what it may have left in its session; holds its pipes
            await asyncio.shield(self._output)

    def ending(self) -> str:
        """How it ended, for people."""
        code = self._process.returncode if self._process else None
        if code is None:
            return "running"
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def signal(self, number: signal.Signals) -> None:
        """To all of its session; nothing if there is none left."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    async def stop(self) -> None:
        """Ask it to end, wait a while, then make it. One that is stopped is woken to be asked."""
        if self._process is None:
            return
        if self._process.returncode is None:
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await self._process.wait()
        self.signal(signal.SIGKILL)
        await self.wait()

    async def _read(self, process: asyncio.subprocess.Process, ready: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as readers:
                readers.create_task(self._read_errors(process.stderr))
                async for line in _lines(process.stdout):
                    if not ready.is_set():
                        self.url = line.split()[-1] if " ready http" in line else ""
                        ready.set()
        finally:
            if not ready.is_set():
                self.url = ""
                ready.set()

    async def _read_errors(self, stream: asyncio.StreamReader | None) -> None:
        async for line in _lines(stream):
            self._tail.append(line)
            self._say(f"{self.name} | {line}")


class _lines:
    """Lines of a pipe; a longer one than asyncio likes comes in pieces."""

    def __init__(self, stream: asyncio.StreamReader | None) -> None:
        self._stream = stream

    def __aiter__(self) -> _lines:
        return self

    async def __anext__(self) -> str:
        if self._stream is None:
            raise StopAsyncIteration
        try:
            line = await self._stream.readline()
        except ValueError:  # over the buffer's limit: dropped
            return "…"
        if not line:
            raise StopAsyncIteration
        return line.decode(errors="replace").rstrip()

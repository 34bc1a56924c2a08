"""Keeps one engine or router running, from within an actor's process.

Ray restarts the actor; this restarts the process that the actor is for.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Literal

from router.base import AwakeClock, StartFailed
from router.supervisor import Backoff, ChildProcess, on_port, watch_health

__all__ = ["Keeper", "Snapshot", "State"]

State = Literal["starting", "ready", "restarting", "ended", "stopped"]
STOP_S = 5.0  # on top of the grace of the process


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How the process is. `problem` is why the latest start failed, or how it last ended."""

    state: State
    url: str = ""
    pid: int = 0
    restarts: int = 0
    failed_starts: int = 0
    problem: str = ""


class Keeper:
    """Runs a command in a thread of its own and restarts it, with a growing delay, when it ends.

    The kernel ends a child with the *thread* that started it, so the thread lives as long as the
    actor's process. The command has `--host` and `--port`: the port stays the same over restarts,
    unless another process has taken it.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        host: str,
        say: Callable[[str], None],
        grace_s: float,
        respawn: bool = True,
        health_deadline_s: float = 0.0,
        restarted: Callable[[], None] = lambda: None,
        before: Callable[[threading.Event], None] = lambda _: None,
    ) -> None:
        """`say` takes each line of output.

        With `health_deadline_s`, a process that has not answered `/health` for so long is killed.
        `before` runs in the thread before the first start; it returns early when the event that it
        is given is set.
        """
        self._child = ChildProcess(name, argv, env, to=say, grace_s=grace_s)
        self._host = host
        self._say = say
        self._grace_s = grace_s
        self._respawn = respawn
        self._health_deadline_s = health_deadline_s
        self._restarted = restarted
        self._before = before
        self._snapshot = Snapshot("starting")
        self._stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._main, name=f"keeper of {name}", daemon=True)

    def start(self) -> None:
        """Start the process in the background."""
        self._thread.start()

    def snapshot(self) -> Snapshot:
        return self._snapshot

    def stop(self) -> None:
        """End the process and wait until it, and its children, are gone. Idempotent."""
        self._stopping.set()
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(self._grace_s + STOP_S)

    def _main(self) -> None:
        self._before(self._stopping)
        if not self._stopping.is_set():
            asyncio.run(self._run())
        if self._snapshot.state != "ended":
            self._set("stopped")

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        awake = AwakeClock()
        async with asyncio.TaskGroup() as tasks:
            ticking = tasks.create_task(awake.run())
            self._task = tasks.create_task(self._keep(tasks, awake))
            if self._stopping.is_set():  # before there was a task to cancel
                self._task.cancel()
            try:
                await asyncio.wait([self._task])
            finally:
                ticking.cancel()
                if self._watching is not None:
                    self._watching.cancel()
                await self._child.stop()

    async def _keep(self, tasks: asyncio.TaskGroup, awake: AwakeClock) -> None:
        child, backoff = self._child, Backoff()
        wanted = int(child.argv[child.argv.index("--port") + 1])
        while True:
            child.argv = on_port(child.argv, wanted if _free(self._host, wanted) else 0)
            child.url = ""
            backoff.began()
            try:
                await child.start(tasks)
            except StartFailed as error:
                self._set("restarting", problem=str(error), failed=1)
                self._say(str(error))
            else:
                wanted = int(child.url.rpartition(":")[2])
                self._set("ready", url=child.url, pid=child.pid)
                self._say(f"{child.name} ready {child.url} (pid {child.pid})")
                if self._health_deadline_s and self._watching is None:
                    watch = watch_health(child, self._health_deadline_s, awake, self._say)
                    self._watching = tasks.create_task(watch)
                await child.wait()
                self._set("restarting", problem=child.ending())
            if not self._respawn:
                self._set("ended")
                self._say(f"{child.name} has ended ({self._snapshot.problem})")
                return
            delay = backoff.delay_s()
            self._say(f"{child.name} has ended ({child.ending()}); restarting in {delay:g} s")
            await asyncio.sleep(delay)
            self._set("restarting", restarts=1)
            self._restarted()

    def _set(
        self,
        state: State,
        *,
        url: str | None = None,
        pid: int = 0,
        problem: str | None = None,
        restarts: int = 0,
        failed: int = 0,
    ) -> None:
        old = self._snapshot
        self._snapshot = Snapshot(
            state,
            old.url if url is None else url,
            pid,
            old.restarts + restarts,
            old.failed_starts + failed,
            old.problem if problem is None else problem,
        )


def _free(host: str, port: int) -> bool:
    """Whether the port can be listened on, as servers here do: others may have it in TIME_WAIT."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True

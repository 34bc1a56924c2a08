"""Tells engines that a lease, a send or a generation is over; cancellation does not stop it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from engine.protocol import MicroserveError
from router.base import EngineUnreachable, NobodyListens, OutOfFiles
from router.engines import Backend

__all__ = ["Releaser"]

log = logging.getLogger(__name__)
PAUSE_S = 0.25  # between two looks whether an engine answers again
KEEP_S = 60.0  # how long a release is repeated; by then the engine has ended an unclaimed lease
MOST_KEPT = 4096  # for one engine


class _Missed(NamedTuple):
    body: dict[str, Any]
    headers: Mapping[str, str]
    until: float  # loop time


class Releaser:
    """Sends releases in tasks of the router's own group: they outlive their request.

    An engine that is stopped or gets no CPU time does not answer, and may miss the release. It is
    told again when it answers health checks, unless its process has ended. An engine that cannot
    be reached ends the lease itself after `lease_ms`.
    """

    def __init__(self, tasks: asyncio.TaskGroup, timeout: float) -> None:
        self._tasks = tasks
        self._timeout = timeout
        self._missed: dict[Backend, deque[_Missed]] = {}
        self._closed = asyncio.Event()

    def spawn(
        self, backend: Backend, body: dict[str, Any], headers: Mapping[str, str]
    ) -> asyncio.Task[None]:
        """Begin a release; `wait` waits for it."""
        return self._tasks.create_task(self._release(backend, body, headers))

    async def wait(self, backend: Backend, release: asyncio.Task[None]) -> None:
        """Wait until the engine has been told, so that the next call finds its pages free.

        Returns at once for an engine that may be gone. Cancellation ends only the waiting.
        """
        if backend.status == "up":
            await asyncio.shield(release)

    def close(self) -> None:
        """Repeat no release any more. Those under way go on; each is bounded."""
        self._closed.set()

    async def _release(
        self, backend: Backend, body: dict[str, Any], headers: Mapping[str, str]
    ) -> None:
        if await self._tell(backend, body, headers) or self._closed.is_set():
            return
        if (missed := self._missed.get(backend)) is None:
            missed = self._missed[backend] = deque(maxlen=MOST_KEPT)
            self._tasks.create_task(self._repeat(backend, missed))
        missed.append(_Missed(body, headers, asyncio.get_running_loop().time() + KEEP_S))

    async def _repeat(self, backend: Backend, missed: deque[_Missed]) -> None:
        """Tell the engine what it has missed, once it answers again."""
        epoch, loop = _epoch(backend), asyncio.get_running_loop()
        try:
            while missed and _epoch(backend) == epoch:
                with suppress(TimeoutError):
                    async with asyncio.timeout(PAUSE_S):
                        await self._closed.wait()
                        return
                while missed and missed[0].until < loop.time():
                    missed.popleft()
                while missed and backend.status == "up" and not self._closed.is_set():
                    one = missed.popleft()
                    if not await self._tell(backend, one.body, one.headers):
                        missed.appendleft(one)
                        break
        finally:
            del self._missed[backend]

    async def _tell(
        self, backend: Backend, body: dict[str, Any], headers: Mapping[str, str]
    ) -> bool:
        """Make the call; return whether the engine has answered, or its process has ended."""
        try:
            async with asyncio.timeout(self._timeout):
                await backend.client.release(body, headers)
        except (MicroserveError, TimeoutError) as error:
            log.info("release %s on engine %s: %s", body, backend.id, str(error) or "timeout")
            silent = isinstance(error, EngineUnreachable | OutOfFiles | TimeoutError)
            return isinstance(error, NobodyListens) or not silent
        except Exception:  # concerns this release only; the router must go on
            log.exception("release %s on engine %s failed", body, backend.id)
        return True


def _epoch(backend: Backend) -> int | None:
    return backend.state.epoch if backend.state is not None else None

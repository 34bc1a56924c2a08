"""Tells engines that a lease, a send or a generation is over; cancellation does not stop it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from engine.protocol import MicroserveError
from router.engines import Backend

__all__ = ["Releaser"]

log = logging.getLogger(__name__)


class Releaser:
    """Sends releases in tasks of the router's own group: they outlive their request.

    An engine that cannot be reached ends the lease itself after `lease_ms`.
    """

    def __init__(self, tasks: asyncio.TaskGroup, timeout: float) -> None:
        self._tasks = tasks
        self._timeout = timeout

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

    async def _release(
        self, backend: Backend, body: dict[str, Any], headers: Mapping[str, str]
    ) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await backend.client.release(body, headers)
        except (MicroserveError, TimeoutError) as error:
            log.info("release %s on engine %s: %s", body, backend.id, str(error) or "timeout")
        except Exception:  # concerns this release only; the router must go on
            log.exception("release %s on engine %s failed", body, backend.id)

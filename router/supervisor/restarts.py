"""When a child is restarted, and when a router counts as stuck."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence

import httpx

from router.base import AwakeClock
from router.supervisor.child_process import ChildProcess

__all__ = ["Backoff", "on_port", "watch_health"]

BACKOFF_S = (0.2, 10.0)  # delay before the first restart, and the longest one
STEADY_S = 30.0  # a child that ran this long is restarted after the first delay again


class Backoff:
    """Delays between the restarts of a child, which double while it keeps dying early."""

    def __init__(self) -> None:
        self._next = BACKOFF_S[0]
        self._began = time.monotonic()

    def began(self) -> None:
        """Note that the child is started now."""
        self._began = time.monotonic()

    def delay_s(self) -> float:
        """Return how long to wait before the next start, now that the child has ended."""
        if time.monotonic() - self._began > STEADY_S:
            self._next = BACKOFF_S[0]
        delay, self._next = self._next, min(2 * self._next, BACKOFF_S[1])
        return delay


def on_port(argv: Sequence[str], port: int | str) -> list[str]:
    """Return the command with another value of `--port`."""
    changed = list(argv)
    changed[changed.index("--port") + 1] = str(port)
    return changed


async def watch_health(
    router: ChildProcess, deadline_s: float, awake: AwakeClock, note: Callable[[str], None]
) -> None:
    """Kill a router that has not answered for `deadline_s`, so that it is restarted.

    A strategy may block it forever in code that cannot be interrupted. Time in which this process
    did not run does not count.
    """
    async with httpx.AsyncClient(verify=False, trust_env=False, timeout=None) as http:  # noqa: S113, S501  asyncio's timeout; this machine
        silent_since = awake()
        while True:
            await asyncio.sleep(deadline_s / 10)
            pid = router.pid
            try:
                async with asyncio.timeout(deadline_s / 2):
                    # A new connection: an open one may belong to an earlier process.
                    await http.get(f"{router.url}/health", headers={"Connection": "close"})
                    silent_since = awake()
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError):
                if not router.ready:
                    silent_since = awake()  # it is being restarted anyway
            if awake() - silent_since > deadline_s and router.pid == pid:
                note(f"router has not answered for {deadline_s:g} s and is killed")
                router.signal(signal.SIGKILL)
                silent_since = awake()

"""A limit on the open connections of a server, so that open files are left for everything else."""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from engine.protocol import BadRequest, Overloaded
from engine.web.protocol import BoundedHttpProtocol

if TYPE_CHECKING:
    from starlette.types import Scope

__all__ = ["ConnectionLimit", "LimitedHttpProtocol", "check_place", "most_connections"]

log = logging.getLogger(__name__)

DEFAULT = 16_384  # connections; each may hold 64 KiB of an incomplete head
# Open files beside the connections, at most: connections to other servers, puts, tiers, logs.
RESERVE = 4096
SPARE = 32  # connections beyond the limit that are still told so
SPARE_S = 5.0  # how long such a connection lives
LOG_S = 60.0  # between two warnings
PROBES = frozenset({"/health", "/metrics"})  # served on spare connections, too
Place = Literal["served", "spare", "none"]


def most_connections(wanted: int) -> int:
    """Return how many connections a server may have: `wanted`, or a default if that is 0.

    Raises the soft limit of open files of this process as far as these connections and `RESERVE`
    files need it. If the hard limit is too low for both, up to half of it stays for other files.
    Raises `BadRequest` if `wanted` connections do not fit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = (wanted or DEFAULT) + RESERVE
    if hard != resource.RLIM_INFINITY:
        files = min(files, hard)
    if soft != resource.RLIM_INFINITY:
        files = max(files, soft)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    room = files - min(files // 2, RESERVE)
    if wanted > room:
        raise BadRequest(
            f"--max-connections {wanted}: of {files} open files (ulimit -n), {room} can be "
            "connections",
            param="max_connections",
        )
    return wanted or min(DEFAULT, room)


class ConnectionLimit:
    """Counts the connections of a server. `served` are within the limit."""

    def __init__(
        self, most: int = sys.maxsize, refused: Callable[[], object] = lambda: None
    ) -> None:
        """`refused` is called for each connection beyond the `most`."""
        self.served = 0
        self._most = most
        self._refused = refused
        self._spare = 0
        self._silent_until = 0.0

    def enter(self) -> Place:
        """Count a connection; return its place, to be given back by `leave`."""
        if self.served < self._most:
            self.served += 1
            return "served"
        self._refused()
        if (now := time.monotonic()) >= self._silent_until:
            self._silent_until = now + LOG_S
            log.warning("further clients are refused: %d connections are open", self.served)
        if self._spare < SPARE:
            self._spare += 1
            return "spare"
        return "none"

    def leave(self, place: Place) -> None:
        """Count a connection no longer."""
        self.served -= place == "served"
        self._spare -= place == "spare"


class LimitedHttpProtocol(BoundedHttpProtocol):
    """A client's connection that counts towards a limit.

    Some connections beyond the limit live for `SPARE_S`, to receive what `check_place` raises.
    Further ones are closed at once.
    """

    def __init__(self, *args: Any, limit: ConnectionLimit, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limit = limit
        self._place: Place = "none"
        self._end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._place = self._limit.enter()
        if self._place == "spare":
            self.app_state = {**self.app_state, "crowded": True}  # of each request
            self._end = self.loop.call_later(SPARE_S, self.abort)
        elif self._place == "none":
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.leave(self._place)
        if self._end is not None:
            self._end.cancel()
        super().connection_lost(exc)


def check_place(scope: Scope) -> None:
    """Raise `Overloaded` for a request on a connection beyond the limit, unless it is a probe.

    Such a connection is closed after its first response.
    """
    state = scope.get("state") or {}
    if "crowded" not in state:
        return
    state["connection"].shutdown()
    if scope["path"] not in PROBES:
        raise Overloaded("this server has as many connections as it may have; retry later")

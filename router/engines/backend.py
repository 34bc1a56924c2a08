"""One engine as the router knows it: its address, its health, and this router's work on it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeVar, get_args

from engine.protocol import EngineState, ModelInfo
from router.base import CancelScope, EngineId, EngineUnreachable
from router.engines.api import ChunkStream, EngineCalls
from router.engines.circuit_breaker import CircuitBreaker

__all__ = ["ROLES", "Backend", "Hosted", "Load", "Role", "Source", "guard"]

T = TypeVar("T")
Role = Literal["any", "prefill", "decode"]
ROLES: tuple[Role, ...] = get_args(Role)
Source = Literal["flag", "file", "admin", "heartbeat"]  # how the router learned of it
Status = Literal["unknown", "up", "suspect", "down"]

# Load of a running stream, in tokens of prefill: about what one more sequence adds to a step, and
# enough to spread streams if no prefill waits.
STREAM_TOKENS = 32


class Load:
    """This router's work in flight on an engine. Each increase is paired with a decrease."""

    __slots__ = ("streams", "tokens")

    def __init__(self) -> None:
        self.tokens = 0  # to prefill or send, not done yet
        self.streams = 0  # generations, and leases that will become one

    @property
    def idle(self) -> bool:
        return not self.tokens and not self.streams

    @property
    def weight(self) -> int:
        return self.tokens + STREAM_TOKENS * self.streams

    @contextmanager
    def work(self, *, tokens: int = 0, streams: int = 0) -> Iterator[None]:
        """Count this much work while the body runs."""
        self.tokens += tokens
        self.streams += streams
        try:
            yield
        finally:
            self.tokens -= tokens
            self.streams -= streams


class Hosted(Protocol):
    """A replica, as the engines at its two ends know it."""

    @property
    def backend(self) -> Backend:
        """The engine that holds it."""
        ...

    @property
    def lag(self) -> int:
        """Tokens of the generation that it lacks."""
        ...

    def lose(self, reason: str) -> None:
        """Its engine has lost it."""
        ...

    def unwanted(self) -> None:
        """Its engine is being drained."""
        ...


class Backend:
    """One engine of the fleet.

    The health monitor sets `status`, except that a leg that cannot reach the engine makes it
    suspect at once. A suspect engine gets no new work until it has answered again.
    """

    def __init__(
        self, client: EngineCalls, breaker: CircuitBreaker, *, id: str = "", source: Source = "flag"
    ) -> None:
        self.client = client
        self.breaker = breaker
        self.id = EngineId(id or client.url.split("//")[-1])
        self.source = source
        self.role: Role = "any"
        self.role_pinned = False  # set by an admin: the role that the engine reports is ignored
        self.labels: Mapping[str, str] = {}
        self.status: Status = "unknown"
        self.draining = False  # by an admin: no new work
        self.leaving = False  # no new work; forgotten once nothing runs there
        self.model: ModelInfo | None = None
        self.state: EngineState | None = None
        self.last_error = ""
        self.load = Load()
        self.settled = asyncio.Event()  # set: a poll has decided `status`: not unknown, not suspect
        self.probe = asyncio.Event()  # set: check its health now, not after the interval
        self.heartbeat = 0.0  # its last one (loop time)
        self.replicas: set[Hosted] = set()  # on this engine, of generations of others
        self.mirrored: set[Hosted] = set()  # of its own generations, on others
        self._calls: set[CancelScope] = set()
        self._streams: set[ChunkStream] = set()

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def usable(self) -> bool:
        """Whether new work may go there."""
        draining = self.draining or (self.state is not None and self.state.draining)
        return self.status == "up" and not draining and not self.leaving

    def suspect(self, reason: str) -> None:
        """Note that a leg could not reach it. Its other legs go on and will notice themselves."""
        self.last_error = reason
        if self.status == "up":
            self.status = "suspect"
            self.settled.clear()
        self.probe.set()

    def go_down(self, reason: str) -> None:
        """Note that it is down: every call and stream in flight fails now.

        A stopped process keeps its sockets open, so its legs would not fail by themselves.
        """
        self.status = "down"
        self.last_error = reason
        for call in self._calls:
            call.cancel()
        for stream in self._streams:
            stream.abort()
        self.lose_replicas(reason)

    def lose_replicas(self, reason: str) -> None:
        """Note that the replicas it held are gone."""
        for replica in list(self.replicas):
            replica.lose(reason)

    def watch(self, stream: ChunkStream) -> None:
        """Abort `stream` if the engine goes down, until `unwatch`."""
        if self.status == "down":
            stream.abort()
        self._streams.add(stream)

    def unwatch(self, stream: ChunkStream) -> None:
        """Idempotent."""
        self._streams.discard(stream)

    def describe(self) -> dict[str, Any]:
        state = self.state
        return {
            "id": self.id,
            "url": self.url,
            "role": self.role,
            "labels": dict(self.labels),
            "source": self.source,
            "status": self.status,
            "draining": self.draining or self.leaving,
            "leaving": self.leaving,
            "breaker": self.breaker.state,
            "model": self.model.name if self.model else None,
            "epoch": state.epoch if state else None,
            "load": {"tokens": self.load.tokens, "streams": self.load.streams},
            "mirrored": {
                "requests": len(self.mirrored),
                "to": Counter(replica.backend.id for replica in self.mirrored),
                "lag_tokens": max((replica.lag for replica in self.mirrored), default=0),
            },
            "replicas": len(self.replicas),
            "last_error": self.last_error or None,
            "state": state.model_dump(exclude={"leases"}) if state else None,
        }


async def guard(call: Coroutine[Any, Any, T], *backends: Backend) -> T:
    """Await `call`. Raises `EngineUnreachable` as soon as one of `backends` goes down."""
    try:
        with CancelScope() as scope:
            for backend in backends:
                if backend.status == "down":
                    raise EngineUnreachable(f"engine {backend.id} is down: {backend.last_error}")
            for backend in backends:
                backend._calls.add(scope)
            try:
                return await call
            finally:
                for backend in backends:
                    backend._calls.discard(scope)
    except TimeoutError:
        gone = next((backend for backend in backends if backend.status == "down"), backends[0])
        raise EngineUnreachable(f"engine {gone.id} went down: {gone.last_error}") from None
    finally:
        call.close()  # if one was down already, the call was never awaited

"""One engine as the router knows it: its address, its health, and this router's work on it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeVar, get_args

from engine.protocol import EngineState, ModelInfo
from router.base.cancel_scope import CancelScope
from router.base.errors import EngineUnreachable
from router.base.ids import EngineId
from router.engines.api import ChunkStream, EngineCalls
from router.engines.circuit_breaker import CircuitBreaker

__all__ = ["ROLES", "Backend", "Hosted", "Load", "Role", "Source", "guard"]

T = TypeVar("T")
Role = Literal["any", "prefill", "decode"]
ROLES: tuple[Role, ...] = get_args(Role)
Source = Literal["flag", "file", "admin", "heartbeat"]  # how the router came to know of it
Status = Literal["unknown", "up", "suspect", "down"]

# A running stream weighs like so many tokens of prefill still to be done: of the order of what a
# step costs with one more sequence in it, and enough to spread streams where no prefill waits.
STREAM_TOKENS = 32


class Load:
    """This router's work in flight on an engine. Only the scopes change it, and in pairs."""

    __slots__ = ("streams", "tokens")

    def __init__(self) -> None:
        self.tokens = 0  # to be prefilled or sent, not done yet
        self.streams = 0  # generations, and leases that wait to become one

    @property
    def idle(self) -> bool:
        return not self.tokens and not self.streams

    @property
    def weight(self) -> int:
        return self.tokens + STREAM_TOKENS * self.streams

    @contextmanager
    def work(self, *, tokens: int = 0, streams: int = 0) -> Iterator[None]:
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
    """One engine of the fleet. `status` is the health monitor's, except that a leg that fails to
    reach the engine makes it suspect at once; a suspect is not chosen until it has answered again.
    """

    def __init__(
        self, client: EngineCalls, breaker: CircuitBreaker, *, id: str = "", source: Source = "flag"
    ) -> None:
        self.client = client
        self.breaker = breaker
        self.id = EngineId(id or client.url.split("//")[-1])
        self.source = source
        self.role: Role = "any"
        self.role_pinned = False  # set by an admin: the engine's own word no longer counts
        self.labels: Mapping[str, str] = {}
        self.status: Status = "unknown"
        self.draining = False  # by an admin: no new work
        self.leaving = False  # no new work, and forgotten when what runs there has ended
        self.model: ModelInfo | None = None
        self.state: EngineState | None = None
        self.last_error = ""
        self.load = Load()
        self.settled = asyncio.Event()  # set: a poll has decided `status`: not unknown, not suspect
        self.probe = asyncio.Event()  # set: ask for its state now, not at the next tick
        self.heartbeat = 0.0  # its last word of itself (loop time)
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
        """A leg could not reach it. Its other legs go on: they will notice themselves."""
        self.last_error = reason
        if self.status == "up":
            self.status = "suspect"
            self.settled.clear()
        self.probe.set()

    def go_down(self, reason: str) -> None:
        """Nothing can be expected of it: every call and stream in flight fails now.

        A stopped process keeps its sockets open, so this is how a leg on it ends.
        """
        self.status = "down"
        self.last_error = reason
        for call in self._calls:
            call.cancel()
        for stream in self._streams:
            stream.abort()
        self.lose_replicas(reason)

    def lose_replicas(self, reason: str) -> None:
        """What it held of other engines' generations is gone."""
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
    """Await `call`; raises `EngineUnreachable` as soon as one of `backends` is lost."""
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
        call.close()  # one was down already: the call was never begun

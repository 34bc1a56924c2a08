"""One engine as the router knows it: its address, its health, and this router's work on it."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, get_args

from engine.protocol import (
    ALL_CAPABILITIES,
    Capability,
    EngineState,
    Internal,
    ModelInfo,
    Unsupported,
)
from router.base import CancelScope, EngineId, EngineUnreachable
from router.engines.api import ChunkStream, EngineCalls
from router.engines.circuit_breaker import CircuitBreaker
from router.engines.load import Load

__all__ = ["ROLES", "Backend", "Hosted", "Refusal", "Role", "Source", "guard"]

T = TypeVar("T")
Role = Literal["any", "prefill", "decode"]
ROLES: tuple[Role, ...] = get_args(Role)
Source = Literal[
    "flag", "file", "admin", "heartbeat", "discovery", "store"
]  # from where it is known
Status = Literal["unknown", "up", "suspect", "down"]

SHOWN = 64  # characters of a fingerprint
# The part of the time that counts as silence while an engine reports work: a request that waits
# there is silent too.
BUSY_SHARE = 0.05


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


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the process of `epoch` may not serve.

    That is so while the model with the fingerprint `served` is served, or, `final`, in any case.
    """

    epoch: int
    reason: str
    served: str = ""
    final: bool = False


class _Call(CancelScope):
    """A call in flight, which `owner` has to answer."""

    __slots__ = ("owner", "silent_s", "why")

    def __init__(self, owner: Backend | None) -> None:
        super().__init__()
        self.owner = owner
        self.silent_s = 0.0
        self.why = ""


class _Silence:
    """How long an engine has said nothing on a stream."""

    __slots__ = ("s", "seen")

    def __init__(self) -> None:
        self.seen: int | None = None  # events
        self.s = 0.0


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
        self.labels_from: Source | None = None
        self.status: Status = "unknown"
        self.draining = False  # by an admin: no new work
        self.leaving = False  # no new work; forgotten once nothing runs there
        self.model: ModelInfo | None = None
        self.state: EngineState | None = None
        self.refusal: Refusal | None = None
        self.named: int | None = None  # the epoch in which it took the id that it reports
        self.fetched = -math.inf  # when its model was last read (loop time)
        self.last_error = ""
        self.warning = ""  # what is wrong although it serves
        self.refused_heartbeat = ""  # why the ledger does not take what it reports
        self.doubts = 0  # how often a leg or the router has taken it for lost
        self.load = Load()
        self.settled = asyncio.Event()  # set: a poll has decided `status`: not unknown, not suspect
        self.probe = asyncio.Event()  # set: check its health now, not after the interval
        self.heartbeat = 0.0  # its last one (loop time)
        # In the order of their starts: a simulation ends them in the same order each time.
        self.replicas: dict[Hosted, None] = {}  # on this engine, of generations of others
        self.mirrored: dict[Hosted, None] = {}  # of its own generations, on others
        self._calls: dict[_Call, None] = {}
        self._streams: dict[ChunkStream, _Silence] = {}

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def usable(self) -> bool:
        """Whether new work may go there."""
        draining = self.draining or (self.state is not None and self.state.draining)
        return self.status == "up" and not draining and not self.leaving

    def holds(self, tokens: int) -> bool:
        """Whether its context has room for so many tokens, as far as its model is known."""
        return self.model is None or self.model.context_length >= tokens

    def can(self, capability: Capability) -> bool:
        """Whether it has a capability, as far as its model is known. Raises `ValueError`."""
        if capability not in ALL_CAPABILITIES:
            known = ", ".join(ALL_CAPABILITIES)
            raise ValueError(f"no capability {capability!r}; there are: {known}")
        return self.model is None or capability in self.model.capabilities

    @property
    def page_size(self) -> int:
        """Tokens of a page. Raises `Internal` before the model is known."""
        if self.model is None:
            raise Internal(f"engine {self.id} is used before it is known")
        return self.model.page_size

    def require(self, *capabilities: Capability) -> None:
        """Raise `Unsupported`, with the capability as its code, if it lacks one of these."""
        for capability in capabilities:
            if not self.can(capability):
                raise Unsupported(
                    f"engine {self.id} does not support {capability}", code=capability
                )

    def suspect(self, reason: str) -> None:
        """Note that a leg could not reach it. Its other legs go on and will notice themselves."""
        if self.status == "up":
            self.last_error = reason
            self.doubts += 1
            self.status = "suspect"
            self.settled.clear()
        self.probe.set()

    def go_down(self, reason: str) -> None:
        """Note that it is down: every call and stream in flight fails now.

        A stopped process keeps its sockets open, so its legs would not fail by themselves.
        """
        self.doubts += 1
        self.status = "down"
        self.last_error = reason
        self.load.others = 0
        for call in self._calls:
            call.cancel()
        for stream in list(self._streams):
            stream.abort(f"engine {self.id} went down: {reason}")
        self.lose_replicas(reason)

    def lose_replicas(self, reason: str) -> None:
        """Note that the replicas it held are gone."""
        for replica in list(self.replicas):
            replica.lose(reason)

    def end_silent(self, elapsed_s: float, limit_s: float) -> None:
        """Fail the calls and streams about which it has said nothing for `limit_s` seconds.

        To be called whenever it has answered, with the time since the last answer. While it reports
        work, only `BUSY_SHARE` of the time counts.
        """
        state = self.state
        if state is not None and (state.running or state.waiting or state.puts_in_flight):
            elapsed_s *= BUSY_SHARE
        why = f"engine {self.id} has said nothing about the request for more than {limit_s:g} s"
        for call in self._calls:
            if call.owner is self:
                call.silent_s += elapsed_s
                if call.silent_s > limit_s:
                    call.why = why
                    call.cancel()
        for stream, silence in list(self._streams.items()):
            events = stream.progress()
            if events is None or events != silence.seen:
                silence.seen, silence.s = events, 0.0
                continue
            silence.s += elapsed_s
            if silence.s > limit_s:
                stream.abort(why)

    @property
    def secret_digest(self) -> str | None:
        """The digest of its cluster secret; None if it has not told."""
        return self.state.secret_digest if self.state is not None else None

    def barrier_to(self, other: Backend) -> str:
        """Return what keeps KV from moving between the two, as far as is known; empty: nothing."""
        if self.model and other.model and self.model.fingerprint != other.model.fingerprint:
            return "have different KV: weights, dtype, layout or page size"
        mine, theirs = self.secret_digest, other.secret_digest
        if None not in (mine, theirs) and mine != theirs:
            return "have different cluster secrets"
        return ""

    def exchanges_with(self, other: Backend) -> bool:
        """Whether the two have the same kind of KV and accept each other's addresses."""
        return self is other or not self.barrier_to(other)

    def sends_to(self, other: Backend) -> bool:
        """Whether it can put KV into `other`."""
        return self.can("remote_send") and other.can("prep_recv") and self.exchanges_with(other)

    def watch(self, stream: ChunkStream) -> None:
        """Abort `stream` if the engine goes down, until `unwatch`."""
        if self.status == "down":
            stream.abort()
        self._streams[stream] = _Silence()

    def unwatch(self, stream: ChunkStream) -> None:
        """Idempotent."""
        self._streams.pop(stream, None)

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
            "context_length": self.model.context_length if self.model else None,
            "page_size": self.model.page_size if self.model else None,
            "kv": self.model.fingerprint[:SHOWN] if self.model else None,
            "capabilities": self.model.capabilities if self.model else None,
            "epoch": state.epoch if state else None,
            "load": {
                "tokens": self.load.tokens,
                "streams": self.load.streams,
                "others": self.load.others,
            },
            "mirrored": {
                "requests": len(self.mirrored),
                "to": Counter(replica.backend.id for replica in self.mirrored),
                "lag_tokens": max((replica.lag for replica in self.mirrored), default=0),
            },
            "replicas": len(self.replicas),
            "last_error": self.last_error or self.warning or self.refused_heartbeat or None,
            "state": state.model_dump(exclude={"leases", "secret_digest"}) if state else None,
        }


async def guard(call: Coroutine[Any, Any, T], *backends: Backend, endless: bool = False) -> T:
    """Await `call` to the first of `backends`.

    Raises `EngineUnreachable` as soon as one of `backends` goes down, or when the first one has
    said nothing for too long. `endless`: it may say nothing.
    """
    scope = _Call(None if endless else backends[0])
    try:
        with scope:
            for backend in backends:
                if backend.status == "down":
                    raise EngineUnreachable(f"engine {backend.id} is down: {backend.last_error}")
            for backend in backends:
                backend._calls[scope] = None
            try:
                return await call
            finally:
                for backend in backends:
                    backend._calls.pop(scope, None)
    except TimeoutError:
        if scope.why:
            raise EngineUnreachable(scope.why) from None
        gone = next((backend for backend in backends if backend.status == "down"), backends[0])
        raise EngineUnreachable(f"engine {gone.id} went down: {gone.last_error}") from None
    finally:
        call.close()  # if one was down already, the call was never awaited

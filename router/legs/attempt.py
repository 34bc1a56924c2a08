"""One attempt at one choice of a request: names its legs, guards them, cleans up."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, TypeVar

from engine.protocol import (
    Capability,
    Draining,
    Internal,
    LeaseExpired,
    MicroserveError,
    PeerUnreachable,
    Timeout,
    Unsupported,
)
from router.base import (
    BadReply,
    EngineRequestId,
    EngineUnreachable,
    LeaseId,
    Moved,
    Request,
    RouterConfig,
)
from router.engines import Backend, ChunkStream, Expected, Registry, guard
from router.legs.choices import Choices
from router.legs.grant import LeaseGrant
from router.legs.releaser import Releaser
from router.legs.replica import MirrorPlan, Replicas
from router.telemetry import Call, Leg, Metrics, Receipt

__all__ = ["Attempt", "Method", "Running", "Runtime"]

T = TypeVar("T")
Method = Callable[[dict[str, Any], Mapping[str, str]], Coroutine[Any, Any, T]]
log = logging.getLogger(__name__)


def _names() -> Iterator[EngineRequestId]:
    """Yield request ids that are unique across routers and their restarts."""
    router = uuid.uuid4().hex[:16]
    return (EngineRequestId(f"{router}-{number}") for number in itertools.count())


@dataclass(frozen=True, slots=True)
class Runtime:
    """What all attempts of a router share."""

    config: RouterConfig
    registry: Registry
    releaser: Releaser
    metrics: Metrics
    tasks: asyncio.TaskGroup  # of the router: its tasks must not raise
    names: Iterator[EngineRequestId] = field(default_factory=_names)  # of attempts, on the engines


class Running(Protocol):
    """A generation of an attempt, as the attempt ends it."""

    @property
    def backend(self) -> Backend: ...

    @property
    def mirror(self) -> MirrorPlan | None: ...

    @property
    def tokens(self) -> int:
        """Tokens of prompt and output, up to the last emitted one."""
        ...

    def stop(self) -> asyncio.Task[None] | None:
        """End it if it still runs; the engine is told in the task returned."""
        ...


class Attempt:
    """Entered around one run of a strategy. On exit it aborts the generations that still run.

    `request_id` names all its legs on the engines. `blamed` collects the engines at fault for a
    failed leg; the next attempt avoids them.
    """

    def __init__(
        self,
        runtime: Runtime,
        receipt: Receipt,
        *,
        request_id: EngineRequestId,
        headers: Mapping[str, str],
        choice: int,
        number: int,
        backends: list[Backend],
        replicas: Replicas,
        choices: Choices | None = None,
        accepted: Callable[[], None] = lambda: None,
        needs: int = 0,
        fills: int = 0,
    ) -> None:
        """`replicas` are those of the choice; `choices` is given for prompts with several.

        `accepted` is called whenever an engine has accepted a call. `needs`: tokens of the context
        that an engine must have to take it over. `fills`: tokens for which it needs room at first.
        """
        self.runtime = runtime
        self.receipt = receipt
        self.request_id = request_id
        self.backends = backends
        self.alone = len(backends) == 1
        self.needs = needs
        self.fills = fills
        self.blamed: set[Backend] = set()
        self.senders: set[Backend] = set()  # those that say that they have sent KV
        self.streams: list[Running] = []
        self.grants: list[LeaseGrant] = []
        self.replicas = replicas
        self.choices = choices
        self.mirrored = False  # whether one of its generations asked for a replica
        self.origin: Running | None = None  # after `Moved`: the generation that holds most KV
        self.put_computed = 0  # tokens that this attempt's sends have computed and put
        self._accepted = accepted
        self.headers = headers
        self._choice = choice
        self._number = number

    async def __aenter__(self) -> Attempt:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Moved):
            self.origin = max(self.streams, key=_tokens, default=None)
        # Begin all releases before waiting: waiting may be cancelled, beginning cannot.
        releases = [(stream.backend, stream.stop()) for stream in self.streams]
        # Break the reference cycles: streams and the origin of `choices` refer to this attempt.
        self.streams.clear()
        self.choices = None
        for grant in self.grants:
            grant.reserved_load.close()
            if grant.open:  # the strategy did not leave its `async with`
                grant.consumed = True
                body = {"lease_id": grant.lease_id}
                release = self.runtime.releaser.spawn(grant.backend, body, self.headers)
                releases.append((grant.backend, release))
        self.grants.clear()
        for backend, ending in releases:
            if ending is not None:
                await self.runtime.releaser.wait(backend, ending)

    def begin_leg(self, call: Call, backend: Backend, begin: int, end: int) -> Leg:
        """Add a leg to the receipt; the caller notes its end."""
        leg = Leg(
            call,
            backend.id,
            self.request_id,
            self._choice,
            self._number,
            begin,
            end,
            start_ms=self.receipt.elapsed_ms(),
        )
        self.receipt.legs.append(leg)
        return leg

    def leg(
        self, call: Call, backend: Backend, begin: int, end: int
    ) -> AbstractContextManager[Leg]:
        """A leg that lasts as long as the body."""
        return self.receipt.timed(self.begin_leg(call, backend, begin, end))

    def require(self, backend: Backend, *capabilities: Capability) -> None:
        """Raise `Unsupported` if `backend` lacks one of these; the next attempt avoids it then."""
        try:
            backend.require(*capabilities)
        except Unsupported:
            self.blamed.add(backend)
            self.fallback("unsupported", once=True)
            raise

    def expect(self, backend: Backend, request: Request, end: int) -> Expected:
        """Announce that the full pages of `tokens[:end]` will enter `backend`'s prefix cache."""
        return self.runtime.registry.prefixes.expect(backend, request, end)

    async def call(
        self,
        backend: Backend,
        method: Method[T],
        body: dict[str, Any],
        *,
        receiver: Backend | None = None,
        named: bool = True,
    ) -> T:
        """Call `backend`; fails as soon as it, or the `receiver` of a send, is lost.

        If the call ends early, by cancellation or a bad reply too, the engine is told to abort it.
        `named`: the body gets the attempt's `request_id`.
        """
        if named:
            body["request_id"] = self.request_id
        backends = (backend,) if receiver is None else (backend, receiver)
        backend.breaker.begin()
        answered = False
        try:
            reply = await guard(method(body, self.headers), *backends)
            answered = True
        except MicroserveError as error:
            # After a bad reply, the engine may still do, or hold, what it was asked for.
            answered = not isinstance(error, EngineUnreachable | BadReply)
            if receiver is not None and _fails_at_receiver(error, answered, backend, receiver):
                self.note_failure(error, receiver)
            else:
                self.note_failure(error, backend)
            raise
        finally:
            if not answered:
                await self.release(backend, {"request_id": self.request_id})
        self.note_success(backend)
        if receiver is not None:
            self.senders.add(backend)
        self._accepted()
        return reply

    async def start(self, backend: Backend, body: dict[str, Any]) -> ChunkStream:
        """Start a generation; `Running.stop` aborts it."""
        body["request_id"] = self.request_id
        backend.breaker.begin()
        stream = await guard(backend.client.start_generate(body, self.headers), backend)
        self._accepted()
        return stream

    async def release(self, backend: Backend, body: dict[str, Any]) -> None:
        """Have `backend` end what `body` names. Cancellation ends only the waiting."""
        release = self.runtime.releaser.spawn(backend, body, self.headers)
        await self.runtime.releaser.wait(backend, release)

    def spawn_release(
        self, backend: Backend, lease_id: LeaseId | None = None
    ) -> asyncio.Task[None]:
        """Begin to have `backend` end what it does for this attempt, or only a lease."""
        body = {"request_id": self.request_id} if lease_id is None else {"lease_id": lease_id}
        return self.runtime.releaser.spawn(backend, body, self.headers)

    def note_failure(self, error: MicroserveError, backend: Backend) -> None:
        """Note that a leg failed with `error`.

        Errors that are the engine's own fault count for its breaker. A full engine, a deadline that
        passed there, and a bad request show that the engine answers.
        """
        if isinstance(error, Draining | Unsupported):
            self.blamed.add(backend)
        if isinstance(error, Draining):
            backend.probe.set()
        if isinstance(error, LeaseExpired) and backend not in self.senders:
            # It has waited in vain for KV that others say they have sent: a sender is at fault.
            # Its replies count as successes, so the first time is enough.
            for sender in self.senders:
                self.blamed.add(sender)
                self._note_opening(sender, sender.breaker.trip(), error)
        if not isinstance(error, PeerUnreachable | Internal | Timeout):
            backend.breaker.success()
            return
        self.blamed.add(backend)
        if isinstance(error, EngineUnreachable):
            backend.suspect(error.message)
        if isinstance(error, Timeout):
            backend.breaker.success()
        else:
            self._note_opening(backend, backend.breaker.failure(), error)

    def _note_opening(self, backend: Backend, opened: bool, error: MicroserveError) -> None:
        if opened:
            self.runtime.metrics.breaker_opened.labels(backend.id).inc()
            log.warning("engine %s is left alone for a while: %s", backend.id, error)

    def note_success(self, backend: Backend) -> None:
        """Note that a leg succeeded."""
        backend.breaker.success()

    def delegated(self, name: str) -> None:
        """Note that one strategy has called another, of this name."""
        self.runtime.metrics.delegations.labels(name).inc()
        self.receipt.delegated(name)

    def fallback(self, name: str, *, once: bool = False) -> None:
        """Note that something was done differently from what was asked for.

        `once`: it counts once, however often the request does it.
        """
        if not once or name not in self.receipt.fallbacks:
            self.runtime.metrics.fallbacks.labels(name).inc()
        self.receipt.fallback(name)


def _fails_at_receiver(
    error: MicroserveError, answered: bool, sender: Backend, receiver: Backend
) -> bool:
    """Whether a send failed by its receiver: the sender says so, or the receiver went down."""
    if answered:
        return isinstance(error, PeerUnreachable)
    gone = isinstance(error, EngineUnreachable) and receiver.status == "down"
    return gone and sender.status != "down"


def _tokens(stream: Running) -> int:
    return stream.tokens

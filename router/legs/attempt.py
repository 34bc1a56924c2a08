"""One run of a strategy for one choice of a request: names its legs, guards them, cleans up."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from engine.protocol import Draining, Internal, MicroserveError, PeerUnreachable, Timeout
from router.admission.retry_budget import RetryBudget
from router.base.config import RouterConfig
from router.base.errors import EngineUnreachable, Moved
from router.base.ids import EngineRequestId
from router.base.request import Request
from router.engines.api import ChunkStream
from router.engines.backend import Backend, guard
from router.engines.prefix_index import Expected
from router.engines.registry import Registry
from router.legs.releaser import Releaser
from router.legs.replica import Replicas
from router.legs.token_stream import TokenStream
from router.strategy.lease import Lease
from router.telemetry.metrics import Metrics
from router.telemetry.receipts import Call, Leg, Receipt

__all__ = ["Attempt", "Runtime"]

T = TypeVar("T")
Method = Callable[[dict[str, Any], Mapping[str, str]], Coroutine[Any, Any, T]]
log = logging.getLogger(__name__)


def _names() -> Iterator[EngineRequestId]:
    """Unique over routers and their restarts."""
    router = uuid.uuid4().hex[:16]
    return (EngineRequestId(f"{router}-{number}") for number in itertools.count())


@dataclass(frozen=True, slots=True)
class Runtime:
    """What attempts share with the whole router."""

    config: RouterConfig
    registry: Registry
    releaser: Releaser
    metrics: Metrics
    retries: RetryBudget
    tasks: asyncio.TaskGroup  # of the router: what is started there must not raise
    names: Iterator[EngineRequestId] = field(default_factory=_names)  # of attempts, on the engines


class Attempt:
    """Entered around a strategy's run. On exit it aborts the generations that still run.

    `request_id` is what all its legs are known by on the engines. `blamed` collects the engines at
    fault for a failed leg, which the next attempt avoids.
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
        accepted: Callable[[], None] = lambda: None,
    ) -> None:
        """`replicas` are those of the choice; `accepted` is called whenever an engine has taken a
        call."""
        self.runtime = runtime
        self.receipt = receipt
        self.request_id = request_id
        self.backends = backends
        self.alone = len(backends) == 1
        self.blamed: set[Backend] = set()
        self.streams: list[TokenStream] = []
        self.leases: list[tuple[Backend, Lease]] = []
        self.replicas = replicas
        self.mirrored = False  # whether a generation of it was to have a replica
        self.origin: TokenStream | None = None  # once it is moved: where most of its KV is
        self.put_computed = 0  # tokens computed by this attempt's sends and put
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
            self.origin = max(self.streams, key=_computed, default=None)
        # First begin all releases, then wait: waiting may be cancelled, beginning cannot.
        releases = [(stream.backend, stream.stop()) for stream in self.streams]
        self.streams.clear()  # they know us, as leases do: nothing here is for the collector
        for backend, lease in self.leases:
            lease.expected.close()
            if lease.open:  # of a strategy that would not leave its `async with`
                lease.consumed = True
                body = {"lease_id": lease.lease_id}
                ending = self.runtime.releaser.spawn(backend, body, self.headers)
                releases.append((backend, ending))
        self.leases.clear()
        for backend, release in releases:
            if release is not None:
                await self.runtime.releaser.wait(backend, release)

    def begin_leg(self, call: Call, backend: Backend, begin: int, end: int) -> Leg:
        """Note a leg in the receipt; the caller says when it has ended."""
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

    def expect(self, backend: Backend, request: Request, end: int) -> Expected:
        """The full pages of `tokens[:end]` are on their way into the prefix cache of `backend`."""
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
        """Make a call to `backend`, for as long as it (and a send's `receiver`) is there.

        Whatever ends the call early, cancellation included, the engine is told to abort it.
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
            answered = not isinstance(error, EngineUnreachable)
            # The engine answers and says that the other one does not: that one is to blame.
            relayed = answered and isinstance(error, PeerUnreachable)
            self.blame(error, receiver if relayed and receiver is not None else backend)
            raise
        finally:
            if not answered:
                await self.release(backend, {"request_id": self.request_id})
        self.praise(backend)
        self._accepted()
        return reply

    async def start(self, backend: Backend, body: dict[str, Any]) -> ChunkStream:
        """Start a generation; `TokenStream.stop` aborts it."""
        body["request_id"] = self.request_id
        backend.breaker.begin()
        stream = await guard(backend.client.start_generate(body, self.headers), backend)
        self._accepted()
        return stream

    async def release(self, backend: Backend, body: dict[str, Any]) -> None:
        """Have `backend` end what `body` names; goes on if this is cancelled."""
        release = self.runtime.releaser.spawn(backend, body, self.headers)
        await self.runtime.releaser.wait(backend, release)

    def spawn_release(self, backend: Backend) -> asyncio.Task[None]:
        body = {"request_id": self.request_id}
        return self.runtime.releaser.spawn(backend, body, self.headers)

    def blame(self, error: MicroserveError, backend: Backend) -> None:
        """A leg failed. Errors that are an engine's fault count for its breaker; being full, a
        deadline that passed there, and what is wrong with the request, show that it answers."""
        if isinstance(error, Draining):
            self.blamed.add(backend)
            backend.probe.set()
        if not isinstance(error, PeerUnreachable | Internal | Timeout):
            backend.breaker.success()
            return
        self.blamed.add(backend)
        if isinstance(error, EngineUnreachable):
            backend.suspect(error.message)
        if isinstance(error, Timeout):
            backend.breaker.success()
        elif backend.breaker.failure():
            self.runtime.metrics.breaker_opened.labels(backend.id).inc()
            log.warning("engine %s is left alone for a while: %s", backend.id, error)

    def fallback(self, name: str) -> None:
        """Something was done otherwise than asked for."""
        self.runtime.metrics.fallbacks.labels(name).inc()
        self.receipt.fallback(name)

    def praise(self, backend: Backend) -> None:
        """A leg succeeded."""
        backend.breaker.success()


def _computed(stream: TokenStream) -> int:
    return stream.tokens

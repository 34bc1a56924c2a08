"""Requests on an engine that is being drained continue elsewhere, where they stopped."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import TracebackType

from router.base import CancelScope, Chunk, Moved, Request
from router.engines import Backend
from router.legs import Attempt, Running
from router.strategy import Cluster, Engine

__all__ = ["Relocations", "relocated"]


class Relocations:
    """The attempts that run. Costs nothing until an engine is drained."""

    def __init__(self) -> None:
        self._running: dict[Attempt, CancelScope] = {}

    def movable(self, attempt: Attempt) -> _Movable:
        """Context around an attempt's work. Raises `Moved` if the work must continue elsewhere."""
        return _Movable(self._running, attempt)

    def leave(self, backend: Backend) -> int:
        """Interrupt the attempts that generate on `backend`, or are about to; return how many.

        Sends from `backend` may finish: they take little time. So may what no other engine holds.
        """
        moved = 0
        for attempt, scope in self._running.items():
            if _generates_on(attempt, backend) and not scope.cancelled and _has_room(attempt):
                scope.cancel()
                moved += 1
        return moved


class _Movable:
    __slots__ = ("_attempt", "_running", "_scope")

    def __init__(self, running: dict[Attempt, CancelScope], attempt: Attempt) -> None:
        self._running = running
        self._attempt = attempt
        self._scope = CancelScope()

    def __enter__(self) -> None:
        self._scope.__enter__()
        self._running[self._attempt] = self._scope

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del self._running[self._attempt]
        try:
            self._scope.__exit__(kind, error, traceback)
        except TimeoutError:
            raise Moved("the engine is being drained") from None


def _generates_on(attempt: Attempt, backend: Backend) -> bool:
    return any(
        leg.engine == backend.id
        and leg.request_id == attempt.request_id
        and leg.call in ("prep_recv", "start_generate")
        for leg in attempt.receipt.legs
    )


def _has_room(attempt: Attempt) -> bool:
    return bool(attempt.runtime.registry.usable(holding=attempt.needs))


async def relocated(
    attempt: Attempt, cluster: Cluster, request: Request, origin: Running
) -> AsyncGenerator[Chunk, None]:
    """Yield what `origin`, which has been ended, would have emitted after `request.output`.

    It resumes from the replica of `origin` if that is up to date. Otherwise the old engine sends
    the full pages of prompt and output that it has cached to another one, which computes the rest:
    at most a page, and what the old engine has lost. If no other engine can receive them, one
    computes everything. Raises what the calls raise.
    """
    mirror = origin.mirror
    attempt.alone = False  # the old engine takes part, though it takes no new work
    kv = cluster.replica
    if kv and mirror and len(request.tokens) - kv.match_len <= 2 * mirror.every + 1:
        stream = kv.engine.resume(request, mirror, kv=kv)
        async for chunk in stream:
            yield chunk
        return
    old = Engine(attempt, origin.backend)
    if origin.backend.usable:  # another of the attempt's engines had to be left
        async for chunk in old.resume(request, mirror):
            yield chunk
        return
    new = cluster.decode.receiving_from(old).least_loaded(exclude=old)
    if new == old:
        async for chunk in cluster.decode.least_loaded(exclude=old).resume(request, mirror):
            yield chunk
        return
    page = origin.backend.page_size
    end = (len(request.tokens) - 1) // page * page
    async with new.prep_recv(request, end=end) as kv:
        if kv.match_len < end:
            await old.remote_send(request, kv, begin=kv.match_len, end=end)
        async for chunk in new.resume(request, mirror, begin=end, kv=kv):
            yield chunk

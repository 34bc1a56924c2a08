"""Keeps a replica of one running generation in the prefix cache of another engine.

For engines without mirrors. Whenever the generation has some more full pages, they are copied as in
a context migration:

    prep_recv(tokens[:j]) ──► remote_send(match_len … j) ──► commit       j: a multiple of the page

One copy runs at a time, in a task of its own, so that the generation never waits for it. When its
engine is lost, the generation continues where the pages are cached, and computes the rest.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from engine.protocol import MicroserveError
from router.base import Chunk, EngineUnreachable, Pauses, Request
from router.engines import Backend, guard
from router.legs.attempt import Attempt
from router.legs.replica import MirrorPlan, Replica
from router.telemetry import Leg

__all__ = ["CommittedReplica"]

log = logging.getLogger(__name__)

RETRY_S, RETRY_MOST_S = 1.0, 30.0  # pauses after copies that no engine has taken


class CommittedReplica:
    """The copies of a generation on `backend`; the methods are those of `ReplicaUpkeep`."""

    def __init__(
        self, attempt: Attempt, backend: Backend, mirror: MirrorPlan, request: Request
    ) -> None:
        self._attempt = attempt
        self._backend = backend
        self._mirror = mirror
        self._leg: Leg
        self._tokens = list(request.tokens)  # prompt and output
        self._most = len(request.prompt) + request.sampling.max_tokens
        self._page = backend.page_size
        self._step = -(-mirror.every // self._page) * self._page  # tokens between two copies
        self._replica: Replica | None = None
        self._grown = asyncio.Event()  # set: a copy may be due
        self._task: asyncio.Task[None] | None = None

    @property
    def possible(self) -> bool:
        """Whether an engine can take copies now."""
        return bool(self._able())

    async def first(self, leg: Leg) -> dict[str, Any] | None:
        """Note the leg; return `None`, as the engine knows nothing of the replica."""
        self._leg = leg
        return None

    def begun(self, leg: Leg) -> None:
        """Note that the generation runs, and begin to copy in the background."""
        self._leg = leg
        if self.possible:
            self._attempt.fallback("mirrors_committed_prefixes", once=True)
        else:
            self._attempt.fallback("unmirrored")
        self._task = self._attempt.runtime.tasks.create_task(self._keep_up())

    def note(self, chunk: Chunk) -> None:
        """Note the tokens of a chunk."""
        self._tokens += chunk.token_ids
        if self._due():
            self._grown.set()

    def drop(self, reason: str = "not begun") -> None:
        """Note that the generation has not begun: nothing has been copied."""

    def end(self) -> None:
        """Note that the generation is over; its replica now belongs to the choice. Idempotent.

        A copy that runs ends.
        """
        if self._task is not None:
            self._task.cancel()

    def _able(self) -> list[Backend]:
        """Return the engines that can take copies, in the order of the ring."""
        return [
            each
            for each in self._attempt.runtime.registry.ring(self._backend)
            if self._backend.sends_to(each) and each.can("commit") and each.holds(self._most)
        ]

    def _candidates(self) -> list[Backend]:
        """Return them as they are wanted, the one that has the replica first."""
        wanted = self._mirror.ordered(self._able())
        here = self._replica.backend if self._replica is not None else None
        return sorted(wanted, key=lambda backend: backend is not here)

    def _due(self) -> int:
        """Return the end of the copy that is due; 0: none is."""
        end = (len(self._tokens) - 1) // self._page * self._page  # the last token has no KV yet
        replica = self._replica
        if replica is None or replica.over or not replica.backend.usable:
            return end
        return end if end - replica.landed >= self._step else 0

    async def _keep_up(self) -> None:
        pauses = Pauses(RETRY_S, RETRY_MOST_S)
        try:
            while True:
                await self._grown.wait()
                self._grown.clear()
                if not (end := self._due()):
                    continue
                if await self._copied(end):
                    pauses.reset()
                    continue
                self._attempt.fallback("unmirrored")
                await asyncio.sleep(pauses.next())
                self._grown.set()
        except Exception:  # concerns this one stream only; the router must go on
            log.exception("a replica could not be kept")

    async def _copied(self, end: int) -> bool:
        """Copy `tokens[:end]` to the first engine that takes it; return whether there is one."""
        for backend in self._candidates():
            try:
                await self._copy(backend, end)
            except MicroserveError as error:
                self._leg.mirror_error = error.type
                if isinstance(error, EngineUnreachable):
                    backend.probe.set()
            else:
                self._note_copy(backend, end)
                return True
        return False

    async def _copy(self, backend: Backend, end: int) -> None:
        """Bring `tokens[:end]` into the prefix cache of `backend`. Raises the engines' errors.

        Leaving by any exit ends the lease and the send.
        """
        attempt, source = self._attempt, self._backend
        name = f"{attempt.request_id}-r{next(attempt.replicas.numbers)}"
        body = {"request_id": name, "prompt": self._tokens[:end], "end": end}
        called, done = [backend], False
        try:
            lease = await guard(backend.client.prep_recv(body, attempt.headers), backend)
            if lease.match_len < end:
                called.append(source)
                body |= {"begin": lease.match_len, "kv_addr": lease.kv_addr}
                send = source.client.remote_send(body, attempt.headers)
                sent = await guard(send, source, backend)
                attempt.runtime.metrics.put(source.id, backend.id, sent.bytes)
            commit = backend.client.commit({"lease_id": lease.lease_id}, attempt.headers)
            await guard(commit, backend)
            done = True
        finally:
            if not done:
                for each in called:
                    attempt.runtime.releaser.spawn(each, {"request_id": name}, attempt.headers)

    def _note_copy(self, backend: Backend, end: int) -> None:
        replica = self._replica
        if replica is None or replica.over or replica.backend is not backend:
            if replica is not None:
                self._attempt.replicas.end(replica)
            replica = self._replica = Replica(
                backend, self._backend, self._leg, lease_id="", kv_addr="", landed=end,
                lost=self._lost, unwanted=_nothing,
            )  # fmt: skip
            self._attempt.replicas.add(replica)
        self._leg.landed = replica.landed = end
        self._leg.replica, self._leg.mirror_error = backend.id, None

    def _lost(self, reason: str) -> None:
        """Note why the replica is gone; the next token makes another one."""
        self._leg.mirror_error = reason


def _nothing() -> None:
    """The next token notices that the replica's engine is drained."""

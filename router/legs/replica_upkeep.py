"""Keeps a replica of one running generation, even if the engines that hold it are lost.

This never fails the generation, and delays it only at its start, by at most `OPEN_S`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from engine.protocol import MicroserveError, Timeout
from router.base import BadReply, Chunk, EngineUnreachable, Mirrored, Request
from router.engines import Backend, guard
from router.legs.attempt import Attempt
from router.legs.replica import MirrorPlan, Replica
from router.telemetry import Leg

__all__ = ["ReplicaUpkeep"]

log = logging.getLogger(__name__)

RESERVE = 128  # room for further tokens; the engine asks for more when it needs it
OPEN_S, REOPEN_S = 0.5, 5.0  # longest wait for a neighbour: by the generation; in background
RETRY_S, RETRY_MOST_S = 1.0, 30.0  # pauses between attempts to open another replica
# Reasons why a replica that is complete so far gets no more room.
FULL = frozenset({"no_capacity", "bad_request"})


class ReplicaUpkeep:
    """Opens the replica of a generation on `backend`, and replaces it when necessary.

    That is when the replica is lost, cannot grow, or is on an engine that is being drained
    (DéjàVu's recovery, the ring's repair).
    """

    def __init__(
        self,
        attempt: Attempt,
        backend: Backend,
        mirror: MirrorPlan,
        request: Request,
    ) -> None:
        self._mirror = mirror
        self._attempt = attempt
        self._backend = backend
        self._leg: Leg
        self._tokens = list(request.tokens)  # prompt and output
        self._most = len(request.prompt) + request.sampling.max_tokens
        self._replica: Replica | None = None
        self._reported: Mirrored | None = None
        self._repair: asyncio.Task[None] | None = None
        self._over = False

    async def first(self, leg: Leg) -> dict[str, Any] | None:
        """Open the first replica; return the `mirror` field of `start_generate`, or `None`."""
        self._leg = leg
        candidates = self._candidates()
        try:
            if candidates:
                self._replica = await self._open(candidates[0], OPEN_S)
                self._attempt.replicas.add(self._replica)
        except MicroserveError as error:
            self._note_error(error.type)
        if self._replica is None:
            return None
        self._leg.replica = self._replica.backend.id
        return self._body(self._replica)

    def begun(self, leg: Leg) -> None:
        """Note that the generation runs; if it has no replica, open one in the background."""
        self._leg = leg
        if self._replica is None or self._replica.over:
            self._repair_after(0.0)

    def note(self, chunk: Chunk) -> None:
        """Note the tokens of a chunk, and what it reports of the mirror."""
        self._tokens += chunk.token_ids
        if chunk.mirror is not None:
            self._reported = chunk.mirror
            if self._replica is not None:
                self._reported.lease_id = self._reported.lease_id or self._replica.lease_id
            self._apply_report()

    def _apply_report(self) -> None:
        """Apply the last report of a mirror, if it is about the current replica."""
        report, replica = self._reported, self._replica
        if report is None or replica is None or replica.over or report.lease_id != replica.lease_id:
            return
        self._leg.landed = replica.landed = max(replica.landed, report.landed)
        if report.stopped is None or self._repair is not None:
            return
        if report.stopped in FULL:
            self._note_error(report.stopped)
            # What has landed is usable: keep it until there is a better replica.
            self._repair_after(RETRY_S)
        else:
            self.drop(report.stopped)

    def drop(self, reason: str = "not begun") -> None:
        """End the replica: nothing can be resumed from it."""
        if self._replica is not None:
            self._attempt.replicas.end(self._replica)
            self._lost(reason)

    def end(self) -> None:
        """Note that the generation is over; its replicas now belong to the choice. Idempotent."""
        self._over = True
        if self._repair is not None:
            self._repair.cancel()

    @property
    def possible(self) -> bool:
        """Whether an engine can hold the replica now."""
        return bool(self._able())

    def _able(self) -> list[Backend]:
        """Return the engines that can hold it, in the order of the ring."""
        source = self._backend
        if not source.can("mirror"):
            return []
        return [
            each
            for each in self._attempt.runtime.registry.ring(source)
            if source.exchanges_with(each)
            and each.holds(self._most)
            and each.can("prep_recv")
            and each.can("mirror")
        ]

    def _candidates(self) -> list[Backend]:
        able = self._able()
        if self._replica is not None and not self._replica.over:
            able = [backend for backend in able if backend is not self._replica.backend]
        return self._mirror.ordered(able)

    async def _open(self, backend: Backend, patience_s: float) -> Replica:
        """Open a lease on `backend` for all tokens so far and `RESERVE` more.

        Raises the engine's error, and `Timeout` after `patience_s` seconds.
        """
        attempt, tokens = self._attempt, list(self._tokens)
        name = f"{attempt.request_id}-r{next(attempt.replicas.numbers)}"
        body = {
            "request_id": name, "prompt": tokens, "end": len(tokens),
            "reserve": max(0, min(RESERVE, self._most - len(tokens))),
        }  # fmt: skip
        answered = False
        try:
            async with asyncio.timeout(patience_s):
                reply = await guard(backend.client.prep_recv(body, attempt.headers), backend)
            answered = True
        except TimeoutError:
            raise Timeout(f"engine {backend.id} did not answer within {patience_s:g} s") from None
        except MicroserveError as error:
            answered = not isinstance(error, EngineUnreachable | BadReply)
            if isinstance(error, EngineUnreachable):
                backend.suspect(error.message)
            raise
        finally:
            if not answered:
                attempt.runtime.releaser.spawn(backend, {"request_id": name}, attempt.headers)
        return Replica(
            backend,
            self._backend,
            self._leg,
            lease_id=reply.lease_id,
            kv_addr=reply.kv_addr,
            landed=reply.match_len,
            lost=self._lost,
            unwanted=lambda: self._repair_after(0.0),
        )

    def _body(self, replica: Replica) -> dict[str, Any]:
        return {"kv_addr": replica.kv_addr, "every": self._mirror.every}

    def _lost(self, reason: str) -> None:
        self._note_error(reason)
        self._repair_after(0.0)

    def _note_error(self, reason: str) -> None:
        self._leg.mirror_error = reason

    def _repair_after(self, pause: float) -> None:
        """Open another replica in `pause` seconds; retry later until that succeeds."""
        if self._over or self._repair is not None:
            return
        self._repair = self._attempt.runtime.tasks.create_task(self._repair_loop(pause))

    async def _repair_loop(self, pause: float) -> None:
        try:
            while True:
                await asyncio.sleep(pause)
                if await self._replace():
                    break
                self._attempt.fallback("unmirrored")
                pause = min(max(RETRY_S, 2 * pause), RETRY_MOST_S)
        except Exception:  # concerns this one stream only; the router must go on
            log.exception("a replica could not be set up")
            self._reported = None  # or the report would start another repair, which might fail too
        finally:
            self._repair = None
        if not self._over:
            # A report about the new replica may have come before its start was known.
            self._apply_report()

    async def _replace(self) -> bool:
        """Mirror to the first engine that has room; return whether there is one."""
        for backend in self._candidates():
            try:
                new = await self._open(backend, REOPEN_S)
            except MicroserveError as error:
                self._note_error(error.type)
                continue
            begun = False
            try:
                body = {"request_id": self._attempt.request_id, **self._body(new)}
                call = self._backend.client.mirror(body, self._attempt.headers)
                await guard(call, self._backend)
                begun = True
            except MicroserveError as error:
                # The generation is gone or about to be; its stream reports that.
                self._note_error(error.type)
                return False
            finally:
                if not begun:  # after a cancellation too: it holds nothing to resume from
                    self._attempt.replicas.end(new)
            old, self._replica = self._replica, new
            self._attempt.replicas.add(new)
            if old is not None:
                self._attempt.replicas.end(old)
            self._leg.replica, self._leg.mirror_error = backend.id, None
            self._leg.landed = new.landed
            return not new.over
        return False

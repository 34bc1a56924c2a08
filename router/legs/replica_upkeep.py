"""What is done so that one running generation has a replica, whatever becomes of other engines.

Nothing of it delays or fails the generation, but for `OPEN_S` at its start.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from engine.protocol import MicroserveError, Timeout
from router.base.errors import EngineUnreachable
from router.base.request import Chunk, Mirrored, Request
from router.engines.backend import Backend, guard
from router.legs.attempt import Attempt
from router.legs.replica import MirrorPlan, Replica
from router.telemetry.receipts import Leg

__all__ = ["ReplicaUpkeep"]

log = logging.getLogger(__name__)

RESERVE = 128  # tokens of room beyond what there is; the engine asks for more when it needs it
OPEN_S, REOPEN_S = 0.5, 5.0  # how long a neighbour is waited for: by the generation; beside it
RETRY_S, RETRY_MOST_S = 1.0, 30.0  # between attempts to get another replica
FULL = frozenset({"no_capacity", "bad_request"})  # the replica is whole, but gets no more room


class ReplicaUpkeep:
    """Opens the replica of a generation on `backend`, and another one when that is lost, cannot
    grow, or is on an engine that is to be empty (DéjàVu's recovery, the ring's repair)."""

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
        self._tokens = list(request.tokens)  # with what has been emitted
        self._most = len(request.prompt) + request.sampling.max_tokens
        self._replica: Replica | None = None
        self._told: Mirrored | None = None
        self._repair: asyncio.Task[None] | None = None
        self._over = False

    async def first(self, leg: Leg) -> dict[str, Any] | None:
        """The first replica, as `start_generate` takes it; None if there is none for now."""
        self._leg = leg
        candidates = self._candidates()
        try:
            if candidates:
                self._replica = await self._open(candidates[0], OPEN_S)
                self._attempt.replicas.add(self._replica)
        except MicroserveError as error:
            self._note(error.type)
        if self._replica is None:
            return None
        self._leg.replica = self._replica.backend.id
        return self._body(self._replica)

    def begun(self, leg: Leg) -> None:
        """The generation runs: if it has no replica, get one beside it."""
        self._leg = leg
        if self._replica is None or self._replica.over:
            self._unprotected(0.0)

    def saw(self, chunk: Chunk) -> None:
        """What the generation's stream says, of tokens and of the mirror."""
        self._tokens += chunk.token_ids
        if chunk.mirror is not None:
            self._told = chunk.mirror
            if self._replica is not None:
                self._told.lease_id = self._told.lease_id or self._replica.lease_id
            self._heed()

    def _heed(self) -> None:
        """What was last told of a mirror, if that is the replica's."""
        told, replica = self._told, self._replica
        if told is None or replica is None or replica.over or told.lease_id != replica.lease_id:
            return
        self._leg.landed = replica.landed = max(replica.landed, told.landed)
        if told.stopped is None or self._repair is not None:
            return
        if told.stopped in FULL:
            self._note(told.stopped)
            self._unprotected(RETRY_S)  # what it has is good: keep it until there is a better one
        else:
            self.drop(told.stopped)

    def drop(self, reason: str = "not begun") -> None:
        """The replica is no good: nothing can be resumed from it."""
        if self._replica is not None:
            self._attempt.replicas.end(self._replica)
            self._lost(reason)

    def end(self) -> None:
        """The generation is over, one way or the other; what it has is the choice's. Idempotent."""
        self._over = True
        if self._repair is not None:
            self._repair.cancel()

    def _candidates(self) -> list[Backend]:
        ring = self._attempt.runtime.registry.ring(self._backend)
        if self._replica is not None and not self._replica.over:
            ring = [backend for backend in ring if backend is not self._replica.backend]
        return ring if self._mirror.rank is None else sorted(ring, key=self._mirror.rank)

    async def _open(self, backend: Backend, patience_s: float) -> Replica:
        """A lease on `backend` for all tokens so far, and some. Raises what the engine says."""
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
            answered = not isinstance(error, EngineUnreachable)
            if not answered:
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
            unwanted=lambda: self._unprotected(0.0),
        )

    def _body(self, replica: Replica) -> dict[str, Any]:
        return {"kv_addr": replica.kv_addr, "every": self._mirror.every}

    def _lost(self, reason: str) -> None:
        self._note(reason)
        self._unprotected(0.0)

    def _note(self, reason: str) -> None:
        self._leg.mirror_error = reason

    def _unprotected(self, pause: float) -> None:
        """Get another replica, in `pause` seconds, and again later if there is none then."""
        if self._over or self._repair is not None:
            return
        self._repair = self._attempt.runtime.tasks.create_task(self._mend(pause))

    async def _mend(self, pause: float) -> None:
        try:
            while True:
                await asyncio.sleep(pause)
                if await self._replace():
                    break
                self._attempt.fallback("unmirrored")
                pause = min(max(RETRY_S, 2 * pause), RETRY_MOST_S)
        except Exception:  # of this one stream: what else the router does must go on
            log.exception("a replica could not be set up")
            self._told = None  # or we might begin anew, and fail again
        finally:
            self._repair = None
        if not self._over:
            self._heed()  # of the new one, told before we knew that it was begun

    async def _replace(self) -> bool:
        """Mirror to the first engine that has room; returns whether there is one."""
        for backend in self._candidates():
            try:
                new = await self._open(backend, REOPEN_S)
            except MicroserveError as error:
                self._note(error.type)
                continue
            begun = False
            try:
                body = {"request_id": self._attempt.request_id, **self._body(new)}
                call = self._backend.client.mirror(body, self._attempt.headers)
                await guard(call, self._backend)
                begun = True
            except MicroserveError as error:
                # The generation is gone, or about to be: its stream knows.
                self._note(error.type)
                return False
            finally:
                if not begun:  # cancelled as well: nothing is there to be resumed from
                    self._attempt.replicas.end(new)
            old, self._replica = self._replica, new
            self._attempt.replicas.add(new)
            if old is not None:
                self._attempt.replicas.end(old)
            self._leg.replica, self._leg.mirror_error = backend.id, None
            self._leg.landed = new.landed
            return not new.over
        return False

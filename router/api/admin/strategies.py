"""The admin API's strategies: list, activate, promote, roll back; the audit log; events."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from pydantic import Field

from router.api.admin.access import Body
from router.api.openapi import api_router, errors
from router.api.parts import Router
from router.api.rest import EVENT_HEADERS, IDLE_S, EventStream, Http, reply
from router.dry_run import check_on_fleet
from router.rollout import CanaryRules, Changed, Wanted

__all__ = ["routes"]


class Canary(Body):
    """The share of a canary, and what it may do before it is rolled back."""

    percent: float = Field(default=5.0, gt=0.0, le=100.0)
    max_error_rate: float = Field(default=0.01, ge=0.0, le=1.0)
    max_ttft_p99_ms: float | None = Field(default=None, gt=0.0)
    min_requests: int = Field(default=100, ge=1, le=1_000_000)


class Activate(Body):
    """A strategy to activate. `canary`: first for a share of the requests, watched."""

    name: str
    params: dict[str, Any] = Field(default_factory=dict)
    if_generation: int | None = None
    canary: Canary | None = None


class Promote(Body):
    """The generation of the canary that is meant, so that no other one is promoted."""

    generation: int


def _told(changed: Changed) -> dict[str, Any]:
    pending = {"pending_routers": changed.pending} if changed.pending else {}
    return {**changed.revision.describe(), **pending}


def routes(router: Router) -> APIRouter:
    """Return `/admin/strateg…`, `/admin/promote`, `…/rollback`, `…/audit` and `…/events`."""
    api = api_router("Strategies")
    rollout = router.rollout

    @api.get("/admin/strategies", response_model=dict[str, Any])
    async def strategies() -> Response:
        """The strategies, with help and parameters; what runs; whether sources may be loaded."""
        revisions = rollout.revisions
        live = [revision.describe() for revision in revisions.live()]
        canary = None
        if revisions.canary is not None and revisions.candidate is not None:
            number = revisions.candidate.number
            begun = {"generation": number, "since": revisions.canary.since}
            canary = {**begun, **revisions.canary.describe()}
        return reply(
            {
                "active": live[0],
                "generations": live,
                "canary": canary,
                "last_canary": rollout.last_canary,
                "can_roll_back": router.changes.can_roll_back,
                "strategies": router.catalog.describe(),
                "uploads": router.config.allow_upload,
            }
        )

    @api.put("/admin/strategy", response_model=dict[str, Any], responses=errors(404, 409, 501, 503))
    async def activate(http: Http, wanted: Activate) -> Response:
        """Make a strategy active for new requests, atomically.

        Refused if it makes calls that the engines do not support.
        """
        rules = CanaryRules(**wanted.canary.model_dump()) if wanted.canary is not None else None
        bound = router.catalog[wanted.name].bind(wanted.params)
        rollout.revisions.check(wanted.if_generation)
        fallbacks = await check_on_fleet(
            bound, router.registry, router.catalog, own_file=router.config.strategy
        )
        changed = await router.changes.activate(
            http.who, Wanted(bound, wanted.if_generation, rules)
        )
        told = {**_told(changed), "canary": rules is not None}
        return reply({**told, "fallbacks": fallbacks} if fallbacks else told)

    @api.post("/admin/promote", response_model=dict[str, Any], responses=errors(409, 503))
    async def promote(http: Http, wanted: Promote) -> Response:
        """Make the canary the active generation before there is a verdict about it."""
        changed = await router.changes.promote(http.who, wanted.generation)
        return reply({**_told(changed), "canary": False})

    @api.post("/admin/rollback", response_model=dict[str, Any], responses=errors(409, 503))
    async def rollback(http: Http) -> Response:
        """Activate what was active before."""
        return reply({**_told(await router.changes.rollback(http.who)), "canary": False})

    @api.get("/admin/audit", response_model=dict[str, Any], responses=errors(503))
    async def audit() -> Response:
        """Who has changed what, when."""
        return reply({"entries": await router.changes.entries()})

    @api.get("/admin/events", response_class=EventStream, responses=errors(503))
    async def events(http: Http) -> Response:
        """Everything that happens, as it happens, as server-sent events."""
        stream = http.stream(EVENT_HEADERS)
        # A client that does not read blocks the writes below; `abort` ends them.
        with rollout.events.listening(http.abort) as listener:
            await stream.write(b": listening\n\n")
            if http.method == "HEAD":
                listener.end()
            async for frames in listener.frames(IDLE_S):
                await stream.write(frames or b": idle\n\n")
        await stream.end(b"")
        return EventStream()

    return api

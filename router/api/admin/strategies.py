"""The admin API's strategies: list, load, activate, roll back; the audit log; events."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Response
from pydantic import Field

from engine.protocol import BadRequest, Forbidden
from router.api.admin.access import Body
from router.api.openapi import api_router, errors
from router.api.parts import Router
from router.api.rest import EVENT_HEADERS, IDLE_S, EventStream, Http, reply
from router.base import StoreUnavailable
from router.dry_run import check_on_fleet, dry_run_source
from router.rollout import CanaryRules, Changed, Wanted

__all__ = ["routes"]

LOAD_TIMEOUT_S = 10.0


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


class LoadStrategy(Body):
    """The source of a strategy, and where it is from."""

    source: str
    name: str = ""
    file: str = ""


def _told(changed: Changed) -> dict[str, Any]:
    pending = {"pending_routers": changed.pending} if changed.pending else {}
    return {**changed.revision.describe(), **pending}


def routes(router: Router) -> APIRouter:
    """Return `/admin/strateg…`, `/admin/rollback`, `/admin/audit` and `/admin/events`."""
    api = api_router("Strategies")
    rollout = router.rollout
    loading = asyncio.Lock()

    @api.get("/admin/strategies", response_model=dict[str, Any])
    async def strategies() -> Response:
        """The strategies, with help and parameters; what runs, and since when."""
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
                "strategies": router.catalog.describe(),
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

    @api.post(
        "/admin/strategies",
        status_code=201,
        response_model=dict[str, Any],
        responses=errors(409, 500, 503, 504),
    )
    async def load(http: Http, wanted: LoadStrategy) -> Response:
        """Load a strategy from Python source, once it has been tried out."""
        if not router.config.allow_upload:
            raise Forbidden("strategies are loaded from source only with --allow-upload")
        if not wanted.name and not wanted.file:
            raise BadRequest("give a name, or the file that it is from", param="name")
        store = router.changes.store()
        if store is not None and store["status"] != "ok":  # else it would be listed here only
            raise StoreUnavailable("the store is lost: no strategy is loaded until this ends")
        source, name, file = wanted.source, wanted.name, wanted.file
        async with loading:  # one at a time: each takes a process and a thread
            tried = await dry_run_source(source, name=name, file=file)
            # The dry run has imported this module once; here it may still take its time, or hang.
            loaded = await router.catalog.load_in_thread(
                source, name=name, file=file, limit_s=LOAD_TIMEOUT_S
            )
        await router.changes.loaded(http.who, loaded)
        described = {**loaded.describe(), "rehearsed_requests": tried["requests"]}
        return reply(described, status=201)

    @api.post("/admin/rollback", response_model=dict[str, Any], responses=errors(409, 503))
    async def rollback(http: Http) -> Response:
        """Activate what was active before."""
        return reply({**_told(await router.changes.rollback(http.who)), "canary": False})

    @api.get("/admin/audit", response_model=dict[str, Any], responses=errors(503))
    async def audit() -> Response:
        """Who has changed what, when."""
        return reply({"entries": await router.changes.entries()})

    @api.get("/admin/events", response_class=EventStream)
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

"""The admin API's strategies: what there is, what runs, what changes it, and who has changed it."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import Field

from engine.protocol import BadRequest, Timeout
from router.api.admin.access import Body, read_body
from router.api.http import HttpRequest, HttpResponse, json_response
from router.api.openapi import documented
from router.api.parts import Router
from router.api.routes import Route
from router.base.errors import Forbidden
from router.rollout.canary import CanaryRules
from router.simulation.dry_run_process import dry_run_source

__all__ = ["routes"]

LOAD_TIMEOUT_S = 10.0
IDLE_S = 15.0  # a comment, so that dead listeners are noticed
STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


class _Canary(Body):
    percent: float = Field(default=5.0, gt=0.0, le=100.0)
    max_error_rate: float = Field(default=0.01, ge=0.0, le=1.0)
    max_ttft_p99_ms: float | None = Field(default=None, gt=0.0)
    min_requests: int = Field(default=100, ge=1, le=1_000_000)


class _Activate(Body):
    name: str
    params: dict[str, Any] = Field(default_factory=dict)
    if_generation: int | None = None
    canary: _Canary | None = None


class _Load(Body):
    source: str
    name: str = ""
    file: str = ""


def routes(router: Router) -> list[Route]:
    """The handlers of `/admin/strateg…`, `/admin/rollback`, `/admin/audit` and `/admin/events`."""
    rollout = router.rollout

    async def strategies(http: HttpRequest) -> HttpResponse:
        """The strategies, with help and parameters; what runs, and since when."""
        revisions = rollout.revisions
        live = [revision.describe() for revision in revisions.live()]
        canary = None
        if revisions.canary is not None and revisions.candidate is not None:
            number = revisions.candidate.number
            canary = {"generation": number, **revisions.canary.describe()}
        return json_response(
            {
                "active": live[0],
                "generations": live,
                "canary": canary,
                "last_canary": rollout.last_canary,
                "strategies": router.catalog.describe(),
            }
        )

    @documented(body=_Activate, errors=(404, 409))
    async def activate(http: HttpRequest) -> HttpResponse:
        """Make a strategy active for new requests, atomically."""
        wanted = await read_body(_Activate, http)
        rules = CanaryRules(**wanted.canary.model_dump()) if wanted.canary is not None else None
        bound = router.catalog[wanted.name].bind(wanted.params)
        revision = rollout.activate(
            http.who, bound, if_generation=wanted.if_generation, rules=rules
        )
        return json_response({**revision.describe(), "canary": rules is not None})

    @documented(body=_Load, status=201, errors=(409, 500, 504))
    async def load(http: HttpRequest) -> HttpResponse:
        """Load a strategy from Python source, once it has been tried out."""
        if not router.config.allow_upload:
            raise Forbidden("strategies are loaded from source only with --allow-upload")
        wanted = await read_body(_Load, http)
        if not wanted.name and not wanted.file:
            raise BadRequest("give a name, or the file that it is from", param="name")
        source, name, file = wanted.source, wanted.name, wanted.file
        tried = await dry_run_source(source, name=name, file=file)
        try:
            # Somebody's module, though it has been imported once by the dry run: it may take its
            # time here, or all of it.
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                loaded = await asyncio.to_thread(router.catalog.load, source, name=name, file=file)
        except TimeoutError:
            raise Timeout(f"loading took more than {LOAD_TIMEOUT_S:g} s") from None
        rollout.loaded(http.who, loaded)
        described = {**loaded.describe(), "rehearsed_requests": tried["requests"]}
        return json_response(described, status=201)

    @documented(errors=(409,))
    async def rollback(http: HttpRequest) -> HttpResponse:
        """Back to what was active before."""
        return json_response(rollout.rollback(http.who).describe())

    async def audit(http: HttpRequest) -> HttpResponse:
        """Who has changed what, when."""
        return json_response({"entries": rollout.audit_log.entries()})

    @documented(media=("text/event-stream",))
    async def events(http: HttpRequest) -> None:
        """What happens, as it does, as server-sent events."""
        stream = http.stream(STREAM_HEADERS)
        # Who does not read holds up our writing: it is cut off from outside.
        with rollout.events.listening(http.abort) as listener:
            stream.write(b": listening\n\n")
            if http.method == "HEAD":
                listener.end()
            async for frames in listener.frames(IDLE_S):
                if (reading := stream.write(frames or b": idle\n\n")) is not None:
                    await reading
        stream.end(b"")

    return [
        Route("GET", "/admin/strategies", strategies),
        Route("POST", "/admin/strategies", load),
        Route("PUT", "/admin/strategy", activate),
        Route("POST", "/admin/rollback", rollback),
        Route("GET", "/admin/audit", audit),
        Route("GET", "/admin/events", events),
    ]

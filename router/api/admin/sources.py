"""The admin API's sources of strategies: show, check and load them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from msgspec import to_builtins
from pydantic import Field

from engine.protocol import BadRequest
from router.api.admin.access import Body, check_upload
from router.api.openapi import api_router, errors
from router.api.parts import Router
from router.api.rest import Http, reply
from router.base import Conflict, NotFound, StoreUnavailable
from router.dry_run import Problem, check_source, dry_run_source
from router.rollout import Revision
from router.strategy import Strategy

__all__ = ["routes"]

LOAD_TIMEOUT_S = 10.0
NAMELESS = "strategy.py"  # names the source in messages; its only strategy is meant
WAITING = 4  # checks that wait for their turn

Name = Annotated[str, Field(max_length=200)]
Generation = Annotated[int | None, Query(ge=1, le=2**53)]


class CheckSource(Body):
    """The source of a strategy, its name if there are several in it, and parameters to try."""

    source: str
    name: Name = ""
    params: dict[str, Any] = Field(default_factory=dict)


class LoadStrategy(Body):
    """The source of a strategy, and where it is from."""

    source: str
    name: str = ""
    file: str = ""


def routes(router: Router) -> APIRouter:
    """Return `/admin/strategies/…`, and `POST /admin/strategies`."""
    api = api_router("Strategies")
    loading = asyncio.Lock()  # one at a time: each takes a process and a thread
    checks = 0

    @api.get("/admin/strategies/{name}", response_model=dict[str, Any])
    async def show(name: str, generation: Generation = None) -> Response:
        """A strategy with its source.

        It is the latest loaded version, or the one that `generation` runs.
        """
        live = [one for one in router.revisions.live() if one.bound.strategy.name == name]
        found = router.catalog[name] if generation is None else _run_by(live, name, generation)
        running = [one.describe() for one in live if one.bound.strategy is found]
        installed = router.catalog.is_installed(found)
        told = {**found.describe(), "installed": installed, "source": found.source}
        return reply({**told, "generations": running})

    @api.post("/admin/strategies/check", response_model=dict[str, Any], responses=errors(409))
    async def check(wanted: CheckSource) -> Response:
        """Try a strategy's source out as loading does, but load nothing.

        It runs in a process of its own, on virtual engines like those that are up. Each of the
        `problems` has a `kind`, a `message`, and the `line` and `column` where they are known.
        """
        nonlocal checks
        check_upload(router)
        if checks >= WAITING:
            raise Conflict(f"{checks} sources are being checked already; try again soon")
        file = "" if wanted.name else NAMELESS
        checks += 1
        try:
            async with loading:
                tried = await check_source(
                    wanted.source,
                    router.registry,
                    name=wanted.name,
                    file=file,
                    params=wanted.params,
                )
        finally:
            checks -= 1
        if isinstance(tried, Problem):
            place = to_builtins(tried.place)
            problem = {"kind": tried.kind, "message": tried.message, "param": tried.param}
            return reply({"ok": False, "problems": [{**problem, **place}]})
        return reply({"ok": True, "problems": [], **to_builtins(tried)})

    @api.post(
        "/admin/strategies",
        status_code=201,
        response_model=dict[str, Any],
        responses=errors(409, 500, 503, 504),
    )
    async def load(http: Http, wanted: LoadStrategy) -> Response:
        """Load a strategy from Python source, once it has been tried out."""
        check_upload(router)
        if not wanted.name and not wanted.file:
            raise BadRequest("give a name, or the file that it is from", param="name")
        store = router.changes.store()
        if store is not None and store["status"] != "ok":  # else it would be listed here only
            raise StoreUnavailable("the store is lost: no strategy is loaded until this ends")
        source, name, file = wanted.source, wanted.name, wanted.file
        async with loading:
            tried = await dry_run_source(source, name=name, file=file)
            # The dry run has imported this module once; here it may still take its time, or hang.
            loaded = await router.catalog.load_in_thread(
                source, name=name, file=file, limit_s=LOAD_TIMEOUT_S
            )
        await router.changes.loaded(http.who, loaded)
        described = {**loaded.describe(), "rehearsed_requests": tried.requests}
        return reply(described, status=201)

    return api


def _run_by(live: list[Revision], name: str, generation: int) -> Strategy:
    for one in live:
        if one.number == generation:
            return one.bound.strategy
    raise NotFound(f"strategy {name!r} does not run as generation {generation}", param="generation")

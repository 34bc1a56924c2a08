"""The admin API's context migration: moves what an engine has cached of a prefix to another."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from fastapi import APIRouter, Response
from pydantic import Field

from engine.protocol import BadRequest, Timeout
from router.api.admin.access import Body
from router.api.admin.prefix import Prefix, prefix_tokens
from router.api.openapi import api_router, errors
from router.api.parts import Router
from router.api.rest import Http, reply
from router.base import Conflict, NotFound
from router.engines import Backend
from router.execution import Migrated, migrate_prefix

__all__ = ["Migrate", "routes"]


class Migrate(Body):
    """`prefix`: text, or token ids, as `/tokenize` gives them of a conversation. `from` and `to`:
    ids of engines. `pin`: keep it at `to` from eviction, and at `from` no longer."""

    prefix: Prefix
    source: str = Field(alias="from")
    target: str = Field(alias="to")
    pin: bool = False


def routes(router: Router) -> APIRouter:
    """Return `/admin/migrate`."""
    api = api_router("Engines")

    @api.post(
        "/admin/migrate",
        response_model=Migrated,
        responses=errors(404, 409, 429, 501, 502, 503, 504),
    )
    async def migrate(http: Http, wanted: Migrate) -> Response:
        """Move what one engine has cached of a prefix to another one.

        Both have it cached then, and requests go to the less loaded one.
        """
        source, target = (
            _engine(router, wanted.source, "from"),
            _engine(router, wanted.target, "to"),
        )
        if source is target:
            raise BadRequest(f"{source.id} has it already", param="to")
        if target.draining or target.leaving:
            raise Conflict(f"engine {target.id} takes nothing new: it drains", param="to")
        prefix = await prefix_tokens(router, wanted.prefix)
        limit_s = router.config.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                migrated = await migrate_prefix(
                    router.execution.runtime,
                    {"X-Request-Id": http.id},
                    prefix,
                    source,
                    target,
                    pin=wanted.pin,
                )
        except TimeoutError:
            raise Timeout(f"the migration took longer than {limit_s:g} s") from None
        told = {"from": source.id, "to": target.id, **asdict(migrated)}
        await router.changes.note(http.who, "migrated", **told)
        router.events.publish("migration", **told)
        if wanted.pin:
            router.pins.check()  # it may have been pinned at its old place too
        return reply(asdict(migrated))

    return api


def _engine(router: Router, id: str, param: str) -> Backend:
    try:
        return router.registry[id]
    except NotFound as unknown:
        raise NotFound(unknown.message, param=param) from None

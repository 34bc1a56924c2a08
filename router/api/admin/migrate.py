"""The admin API's context migration: moves what an engine has cached of a prefix to another."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field

from engine.protocol import BadRequest, Timeout
from router.api.admin.access import Body
from router.api.http import off_loop
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

    prefix: str | Annotated[list[int], Field(max_length=2**20)]
    source: str = Field(alias="from")
    target: str = Field(alias="to")
    pin: bool = False


def routes(router: Router) -> APIRouter:
    """Return `/admin/migrate`."""
    api = api_router("Engines")

    @api.post(
        "/admin/migrate",
        response_model=Migrated,
        responses=errors(404, 409, 429, 502, 503, 504),
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
        prefix = await _tokens(router, wanted.prefix)
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
        router.rollout.audit_log.note(http.who, "migrated", **told)
        router.events.publish("migration", **told)
        return reply(asdict(migrated))

    return api


def _engine(router: Router, id: str, param: str) -> Backend:
    try:
        return router.registry[id]
    except NotFound as unknown:
        raise NotFound(unknown.message, param=param) from None


async def _tokens(router: Router, prefix: str | list[int]) -> list[int]:
    model = router.registry.model
    if isinstance(prefix, str):
        prefix = await off_loop(len(prefix), model.encode, prefix)
    model.check(prefix, param="prefix")
    return prefix

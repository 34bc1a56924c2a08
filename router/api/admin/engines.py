"""The admin API's engines: list, add, change, drain, remove."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from router.api.admin.access import Body
from router.api.openapi import api_router, errors
from router.api.parts import Router
from router.api.rest import reply
from router.engines import Role, engine_url

__all__ = ["AddEngine", "ChangeEngine", "routes"]

Labels = Annotated[dict[str, str], Field(max_length=64)]


class AddEngine(Body):
    """An engine to use. `heartbeat`: the engine registers itself, and must repeat it to stay."""

    url: str
    id: str = ""
    role: Role | None = None
    labels: Labels | None = None
    heartbeat: bool = False


class ChangeEngine(Body):
    """Changes; what is left out stays. `draining`: no new work, and running work moves away."""

    role: Role | None = None
    draining: bool | None = None
    labels: Labels | None = None


def routes(router: Router) -> APIRouter:
    """Return `/admin/engines`."""
    api = api_router("Engines")
    registry = router.registry

    @api.get("/admin/engines", response_model=dict[str, Any])
    async def engines() -> Response:
        """All engines: their health, load and breakers."""
        return reply({"engines": [backend.describe() for backend in registry]})

    @api.get("/admin/engines/{id:path}", response_model=dict[str, Any])
    async def engine(id: str) -> Response:
        """One engine."""
        return reply(registry[id].describe())

    @api.post("/admin/engines", response_model=dict[str, Any])
    async def add_engine(wanted: AddEngine) -> Response:
        """Add an engine, or renew the heartbeat of a known one."""
        backend = registry.add(
            engine_url(wanted.url),
            id=wanted.id,
            role=wanted.role,
            labels=wanted.labels,
            source="heartbeat" if wanted.heartbeat else "admin",
        )
        if (membership := router.membership) is not None:
            if wanted.heartbeat:
                await membership.announce()
            else:
                await membership.order(backend.url, role=wanted.role, labels=wanted.labels)
        return reply(backend.describe())

    @api.patch("/admin/engines/{id:path}", response_model=dict[str, Any])
    async def change_engine(id: str, wanted: ChangeEngine) -> Response:
        """Change an engine's role or labels, drain it, or use it again."""
        backend = registry[id]
        if wanted.role is not None:
            backend.role, backend.role_pinned = wanted.role, True
        if wanted.labels is not None:
            backend.labels, backend.labels_from = wanted.labels, "admin"
        moved = registry.drain(backend, wanted.draining) if wanted.draining is not None else 0
        if router.membership is not None:
            await router.membership.order(backend.url, **wanted.model_dump())
        return reply({**backend.describe(), "moved": moved})

    @api.delete("/admin/engines/{id:path}", response_model=dict[str, Any], responses=errors(400))
    async def remove_engine(id: str, heartbeat: bool = False) -> Response:
        """Drain an engine, and forget it once nothing runs there.

        Its heartbeats do not bring it back. `heartbeat`: the engine itself ends, and may return.
        """
        backend = registry[id]
        moved = registry.remove(backend, for_good=not heartbeat)
        if router.membership is not None:
            await router.membership.ended(backend.url, for_good=not heartbeat)
        return reply({"removed": backend.id, "moved": moved})

    return api

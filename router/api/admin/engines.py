"""The admin API's engines: list, add, change, drain, remove."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from router.api.admin.access import Body, read_body
from router.api.http import HttpRequest, HttpResponse, json_response
from router.api.openapi import documented
from router.api.parts import Router
from router.api.routes import Route
from router.engines.backend import Role
from router.engines.engines_file import engine_url

__all__ = ["AddEngine", "ChangeEngine", "routes"]

Labels = Annotated[dict[str, str], Field(max_length=64)]


class AddEngine(Body):
    """An engine to use. `heartbeat`: it says so itself, and again and again."""

    url: str
    id: str = ""
    role: Role | None = None
    labels: Labels | None = None
    heartbeat: bool = False


class ChangeEngine(Body):
    """What is left out stays. `draining`: no new work, and what runs there goes on elsewhere."""

    role: Role | None = None
    draining: bool | None = None
    labels: Labels | None = None


def routes(router: Router) -> list[Route]:
    """The handlers of `/admin/engines`, over `router`."""
    registry = router.registry

    @documented()
    async def engines(http: HttpRequest) -> HttpResponse:
        """All engines: their health, load and breakers."""
        return json_response({"engines": [backend.describe() for backend in registry]})

    @documented()
    async def engine(http: HttpRequest) -> HttpResponse:
        """One of them."""
        return json_response(registry[http.params["id"]].describe())

    @documented(body=AddEngine)
    async def add_engine(http: HttpRequest) -> HttpResponse:
        """Add an engine, or hear again of one that is known."""
        wanted = await read_body(AddEngine, http)
        backend = registry.add(
            engine_url(wanted.url),
            id=wanted.id,
            role=wanted.role,
            labels=wanted.labels,
            source="heartbeat" if wanted.heartbeat else "admin",
        )
        return json_response(backend.describe())

    @documented(body=ChangeEngine)
    async def change_engine(http: HttpRequest) -> HttpResponse:
        """Change its role or labels, drain it, or use it again."""
        backend = registry[http.params["id"]]
        wanted = await read_body(ChangeEngine, http)
        if wanted.role is not None:
            backend.role, backend.role_pinned = wanted.role, True
        if wanted.labels is not None:
            backend.labels = wanted.labels
        moved = registry.drain(backend, wanted.draining) if wanted.draining is not None else 0
        return json_response({**backend.describe(), "moved": moved})

    @documented()
    async def remove_engine(http: HttpRequest) -> HttpResponse:
        """Drain it, and forget it once nothing runs there."""
        backend = registry[http.params["id"]]
        return json_response({"removed": backend.id, "moved": registry.remove(backend)})

    return [
        Route("GET", "/admin/engines", engines),
        Route("GET", "/admin/engines/{id}", engine),
        Route("POST", "/admin/engines", add_engine),
        Route("PATCH", "/admin/engines/{id}", change_engine),
        Route("DELETE", "/admin/engines/{id}", remove_engine),
    ]

"""Routes for probes and scrapers: health, metrics, version."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from router.api.openapi import api_router
from router.api.parts import Router
from router.api.rest import reply

__all__ = ["routes"]


def routes(router: Router) -> APIRouter:
    """Return `/health`, `/metrics` and `/version`."""
    api = api_router("Observation")

    @api.get("/health", response_model=dict[str, Any], responses={503: {"model": dict[str, Any]}})
    async def health() -> Response:
        """Whether the router serves, and how many engines it can use; 503 once it shuts down."""
        up = sum(backend.usable for backend in router.registry)
        draining = router.shutdown.begun
        engines = {"up": up, "of": len([*router.registry])}
        body = {"status": "draining" if draining else "ok", "engines": engines}
        return reply(body, status=503 if draining else 200)

    @api.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus text."""
        gauges = router.metrics
        gauges.waiting.set(len(router.queue))
        gauges.generation.set(router.revisions.active.number)
        router.registry.set_gauges(gauges)
        return Response(gauges.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @api.get("/version", response_model=dict[str, str])
    async def show_version() -> Response:
        """The version of this package."""
        return reply({"version": version("microserve")})

    return api

"""Routes for probes and scrapers: health, metrics, version."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from router.api.openapi import api_router
from router.api.parts import Router
from router.api.rest import reply
from router.telemetry import Metrics

__all__ = ["refreshed", "routes"]


def refreshed(router: Router) -> Metrics:
    """Return the metrics, with the gauges set to what is the case now."""
    gauges = router.metrics
    gauges.waiting.set(len(router.queue))
    gauges.generation.set(router.revisions.active.number)
    router.registry.set_gauges(gauges)
    return gauges


def routes(router: Router) -> APIRouter:
    """Return `/health`, `/metrics` and `/version`."""
    api = api_router("Observation")

    @api.get("/health", response_model=dict[str, Any], responses={503: {"model": dict[str, Any]}})
    async def health() -> Response:
        """Whether the router serves, and how many engines it can use; 503 once it shuts down."""
        up = sum(backend.usable for backend in router.registry)
        draining = router.shutdown.begun
        engines = {"up": up, "of": len([*router.registry])}
        body: dict[str, Any] = {"status": "draining" if draining else "ok", "engines": engines}
        if (store := router.changes.store()) is not None:
            body["store"] = store
        return reply(body, status=503 if draining else 200)

    @api.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus text; with --workers, of all workers together."""
        own = refreshed(router)
        peers = router.peers
        text = own.render() if peers is None else await peers.metrics(own.samples())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @api.get("/version", response_model=dict[str, str])
    async def show_version() -> Response:
        """The version of this package."""
        return reply({"version": version("microserve")})

    return api

"""All routes of the router."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache, wraps
from importlib.metadata import version

from router.api.admin import access as admin
from router.api.admin import engines as admin_engines
from router.api.admin import migrate as admin_migrate
from router.api.admin import strategies as admin_strategies
from router.api.http import HttpRequest, HttpResponse, json_response
from router.api.openai.answer import chat_completions, completions
from router.api.openai.models import models, one_model
from router.api.openai.tokens import detokenize, tokenize
from router.api.openapi import DOCS_PAGE, documented, openapi
from router.api.parts import Router
from router.api.routes import Handler, Route, Routes

__all__ = ["make_routes"]


def make_routes(router: Router) -> Routes:
    routes = Routes(
        [
            *_model(router),
            *_about(router, lambda: routes),
            *admin.routes(router),
            *admin_engines.routes(router),
            *admin_migrate.routes(router),
            *admin_strategies.routes(router),
        ]
    )
    return routes


def _model(router: Router) -> list[Route]:
    def bound(
        handler: Callable[[Router, HttpRequest], Awaitable[HttpResponse | None]],
    ) -> Handler:
        @wraps(handler)
        def call(http: HttpRequest) -> Awaitable[HttpResponse | None]:
            return handler(router, http)

        return call

    return [
        Route("POST", "/v1/completions", bound(completions)),
        Route("POST", "/v1/chat/completions", bound(chat_completions)),
        Route("GET", "/v1/models", bound(models)),
        Route("GET", "/v1/models/{id}", bound(one_model)),
        Route("POST", "/tokenize", bound(tokenize)),
        Route("POST", "/detokenize", bound(detokenize)),
    ]


def _about(router: Router, routes: Callable[[], Routes]) -> list[Route]:
    async def health(http: HttpRequest) -> HttpResponse:
        """200 while the router runs, and how many engines can be used; 503 once it is to stop."""
        up = sum(backend.usable for backend in router.registry)
        draining = router.shutdown.begun
        engines = {"up": up, "of": len([*router.registry])}
        body = {"status": "draining" if draining else "ok", "engines": engines}
        return json_response(body, status=503 if draining else 200)

    @documented(media=("text/plain",))
    async def metrics(http: HttpRequest) -> HttpResponse:
        """Prometheus text."""
        gauges = router.metrics
        gauges.waiting.set(len(router.queue))
        gauges.generation.set(router.revisions.active.number)
        router.registry.set_gauges(gauges)
        return HttpResponse(gauges.render(), media="text/plain; version=0.0.4; charset=utf-8")

    @documented(reply=dict[str, str])
    async def show_version(http: HttpRequest) -> HttpResponse:
        """The version of this package."""
        return json_response({"version": version("microserve")})

    @cache  # a tenth of a second
    def document() -> bytes:
        return json_response(openapi(routes())).body

    async def schema(http: HttpRequest) -> HttpResponse:
        """This document."""
        return HttpResponse(document())

    @documented(media=("text/html",))
    async def docs(http: HttpRequest) -> HttpResponse:
        """This document, to look at in a browser."""
        return HttpResponse(DOCS_PAGE, media="text/html; charset=utf-8")

    return [
        Route("GET", "/health", health),
        Route("GET", "/metrics", metrics),
        Route("GET", "/version", show_version),
        Route("GET", "/openapi.json", schema),
        Route("GET", "/docs", docs),
    ]

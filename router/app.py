"""The HTTP application: routes, keys, and what every request gets."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from importlib.metadata import version

from aiohttp import web
from aiohttp.typedefs import Handler

from router import admin, admin_engines, admin_migrate, admin_strategies, middleware
from router.http import json_response
from router.openai.answer import chat_completions, completions
from router.openai.models import models, one_model
from router.openai.tokens import detokenize, tokenize
from router.openapi import DOCS_PAGE, documented, openapi
from router.router import Router

__all__ = ["make_app"]


def make_app(router: Router) -> web.Application:
    app = web.Application(client_max_size=router.config.max_body_mb * 2**20)
    middleware.install(app, router)
    app.router.add_routes(
        [
            *_routes(router),
            *admin.routes(router),
            *admin_engines.routes(router),
            *admin_migrate.routes(router),
            *admin_strategies.routes(router),
        ]
    )
    app.on_shutdown.append(_end_listening(router))
    return app


def _end_listening(router: Router) -> Callable[[web.Application], Awaitable[None]]:
    """Streams of events have no end of their own: they are not what a router waits for."""

    async def end(_: web.Application) -> None:
        router.events.close()

    return end


def _bound(
    router: Router, handler: Callable[[Router, web.Request], Awaitable[web.StreamResponse]]
) -> Handler:
    @functools.wraps(handler)
    async def bound(http: web.Request) -> web.StreamResponse:
        return await handler(router, http)

    return bound


def _routes(router: Router) -> list[web.RouteDef]:
    async def health(http: web.Request) -> web.Response:
        """200 while the router runs, and how many engines can be used; 503 once it is to stop."""
        up = sum(member.usable for member in router.registry)
        draining = router.drain.begun
        engines = {"up": up, "of": len([*router.registry])}
        body = {"status": "draining" if draining else "ok", "engines": engines}
        return json_response(body, status=503 if draining else 200)

    @documented(media=("text/plain",))
    async def metrics(http: web.Request) -> web.Response:
        """Prometheus text."""
        gauges = router.metrics
        gauges.waiting.set(len(router.backlog))
        gauges.generation.set(router.generations.active.number)
        gauges.engines(router.registry)
        return web.Response(
            body=gauges.render(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    @documented(reply=dict[str, str])
    async def show_version(http: web.Request) -> web.Response:
        """The version of this package."""
        return json_response({"version": version("microserve")})

    async def schema(http: web.Request) -> web.Response:
        """This document."""
        return json_response(openapi(http.app))

    @documented(media=("text/html",))
    async def docs(http: web.Request) -> web.Response:
        """This document, to look at in a browser."""
        return web.Response(body=DOCS_PAGE, content_type="text/html")

    return [
        web.post("/v1/completions", _bound(router, completions)),
        web.post("/v1/chat/completions", _bound(router, chat_completions)),
        web.get("/v1/models", _bound(router, models)),
        web.get("/v1/models/{id:.+}", _bound(router, one_model)),
        web.post("/tokenize", _bound(router, tokenize)),
        web.post("/detokenize", _bound(router, detokenize)),
        web.get("/health", health),
        web.get("/metrics", metrics),
        web.get("/version", show_version),
        web.get("/openapi.json", schema),
        web.get("/docs", docs),
    ]

"""The HTTP application: routes, keys, and what every request gets."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from importlib.metadata import version

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from engine.protocol import BadRequest, Internal, MicroserveError, TooLarge, Unauthorized
from router import admin
from router.errors import MethodNotAllowed, NotFound
from router.http import begin_request, json_response
from router.openai.answer import chat_completions, completions
from router.openai.errors import error_headers, error_object
from router.openai.models import models, one_model
from router.openai.tokens import detokenize, tokenize
from router.openapi import DOCS_PAGE, documented, openapi
from router.router import Router

__all__ = ["make_app"]

log = logging.getLogger(__name__)
# Open to everybody: probes and scrapers have no keys.
OPEN = frozenset({"/health", "/metrics", "/version", "/openapi.json", "/docs"})


def make_app(router: Router) -> web.Application:
    app = web.Application(
        middlewares=[_outermost(router), _keys(router)],
        client_max_size=router.config.max_body_mb * 2**20,
    )
    app.router.add_routes([*_routes(router), *admin.routes(router)])
    return app


def _outermost(router: Router) -> Middleware:
    """Request id, error objects, counting. The one place where exceptions become replies."""

    @web.middleware
    async def outermost(request: web.Request, handler: Handler) -> web.StreamResponse:
        request_id = begin_request(request)
        response: web.StreamResponse
        try:
            response = await handler(request)
        except MicroserveError as error:
            response = _error(error)
        except web.HTTPException as error:
            response = _error(_of_aiohttp(request, error))
        except ConnectionResetError:
            raise  # the client has gone while we wrote: nobody is there to be told
        except Exception:
            log.exception("request %s failed", request_id)
            response = _error(Internal("the router failed; its log says how"))
        resource = request.match_info.route.resource
        path = resource.canonical if resource is not None else "other"
        router.metrics.requests.labels(path, response.status).inc()
        if not response.prepared:
            response.headers["X-Request-Id"] = request_id
        return response

    return outermost


def _keys(router: Router) -> Middleware:
    @web.middleware
    async def keys(request: web.Request, handler: Handler) -> web.StreamResponse:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else ""
        if request.path.startswith("/admin/"):
            admin.check_admin(router, request, given)
        else:
            key = router.config.api_key
            if key and request.path not in OPEN and not admin.same_key(given, key):
                raise Unauthorized("a valid API key is needed", code="invalid_api_key")
        return await handler(request)

    return keys


def _error(error: MicroserveError) -> web.Response:
    response = json_response(error_object(error), status=error.status)
    response.headers.update(error_headers(error))
    return response


def _of_aiohttp(http: web.Request, error: web.HTTPException) -> MicroserveError:
    """What aiohttp itself refuses, as ours."""
    if error.status == 404:
        return NotFound(f"no such path: {http.path}")
    if error.status == 413:
        return TooLarge("the body is too large")
    if error.status == 405:
        return MethodNotAllowed(f"{http.path} takes no {http.method}")
    return BadRequest(f"{http.method} {http.path}: {error.reason}")


def _bound(
    router: Router, handler: Callable[[Router, web.Request], Awaitable[web.StreamResponse]]
) -> Handler:
    @functools.wraps(handler)
    async def bound(http: web.Request) -> web.StreamResponse:
        return await handler(router, http)

    return bound


def _routes(router: Router) -> list[web.RouteDef]:
    async def health(http: web.Request) -> web.Response:
        """200 while the router runs, and how many engines can be used."""
        up = sum(member.usable for member in router.registry)
        return json_response({"status": "ok", "engines": {"up": up, "of": len([*router.registry])}})

    @documented(media=("text/plain",))
    async def metrics(http: web.Request) -> web.Response:
        """Prometheus text."""
        gauges = router.metrics
        gauges.waiting.set(len(router.backlog))
        gauges.generation.set(router.generations.active.number)
        gauges.engine_up.clear()
        for member in router.registry:
            gauges.engine_up.labels(member.id).set(member.usable)
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

"""The HTTP application: routes, keys, and what every request gets."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from pydantic import BaseModel, ConfigDict, ValidationError

from engine.protocol import BadRequest, Internal, MicroserveError, TooLarge, Unauthorized
from router import admin
from router.errors import MethodNotAllowed, ModelNotFound, NotFound
from router.http import begin_request, json_response, off_loop
from router.model import ServedModel
from router.openai.answer import chat_completions, completions
from router.openai.errors import error_headers, error_object, invalid
from router.openai.messages import load, read_chat
from router.router import Router

__all__ = ["make_app"]

log = logging.getLogger(__name__)
# Open to everybody: probes and scrapers have no keys.
OPEN = frozenset({"/health", "/metrics", "/version"})


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


class _Tokenize(BaseModel):
    model_config = ConfigDict(strict=True)
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class _Detokenize(BaseModel):
    model_config = ConfigDict(strict=True)
    model: str | None = None
    tokens: list[int]


def _tokenize(body: bytes, model: ServedModel) -> list[int]:
    fields = load(body)
    if "messages" in fields:
        return read_chat(body, model).prompts[0]
    wanted = _Tokenize.model_validate(fields)
    return model.encode(wanted.prompt, special=wanted.add_special_tokens)


def _detokenize(body: bytes, model: ServedModel) -> str:
    wanted = _Detokenize.model_validate(load(body))
    if wanted.tokens:
        model.check(wanted.tokens, param="tokens")
    return model.decode(wanted.tokens)


def _routes(router: Router) -> list[web.RouteDef]:
    async def complete(http: web.Request) -> web.StreamResponse:
        return await completions(router, http)

    async def chat(http: web.Request) -> web.StreamResponse:
        return await chat_completions(router, http)

    def card() -> dict[str, Any]:
        info = router.registry.model.info
        return {
            "id": info.name,
            "object": "model",
            "created": 0,
            "owned_by": "microserve",
            "max_model_len": info.context_length,
        }

    async def models(http: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [card()]})

    async def one_model(http: web.Request) -> web.Response:
        if http.match_info["id"] != card()["id"]:
            raise ModelNotFound(f"the model {http.match_info['id']!r} is not served here")
        return json_response(card())

    async def tokenize(http: web.Request) -> web.Response:
        body, model = await http.read(), router.registry.model
        try:
            tokens = await off_loop(len(body), _tokenize, body, model)
        except ValidationError as error:
            raise invalid(error) from None
        limit = model.info.context_length
        return json_response({"count": len(tokens), "max_model_len": limit, "tokens": tokens})

    async def detokenize(http: web.Request) -> web.Response:
        body, model = await http.read(), router.registry.model
        try:
            return json_response({"prompt": await off_loop(len(body), _detokenize, body, model)})
        except ValidationError as error:
            raise invalid(error) from None

    async def health(http: web.Request) -> web.Response:
        up = sum(member.usable for member in router.registry)
        return json_response({"status": "ok", "engines": {"up": up, "of": len([*router.registry])}})

    async def metrics(http: web.Request) -> web.Response:
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

    async def show_version(http: web.Request) -> web.Response:
        return json_response({"version": version("microserve")})

    return [
        web.post("/v1/completions", complete),
        web.post("/v1/chat/completions", chat),
        web.get("/v1/models", models),
        web.get("/v1/models/{id:.+}", one_model),
        web.post("/tokenize", tokenize),
        web.post("/detokenize", detokenize),
        web.get("/health", health),
        web.get("/metrics", metrics),
        web.get("/version", show_version),
    ]

"""What every HTTP request passes on its way in and out: its id, its key, its limits, its errors."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from engine.protocol import BadRequest, Draining, Internal, MicroserveError, TooLarge
from router.admin import check_admin
from router.errors import MethodNotAllowed, NotFound, RateLimited, SlowClient
from router.http import CALLER, RECEIPT, TRACE, TRACING, begin_request, json_response
from router.keys import Key, bearer
from router.lifetime import server_timing
from router.openai.errors import error_headers, error_object
from router.router import Router

__all__ = ["install"]

log = logging.getLogger(__name__)
# Open to everybody: probes and scrapers have no keys.
OPEN = frozenset({"/health", "/metrics", "/version", "/openapi.json", "/docs"})
# These count for a key's limits, and are not begun any more when the router is to stop.
MODEL = "/v1/"


def install(app: web.Application, router: Router) -> None:
    """Put `app` behind all of this."""
    app[TRACING] = router.tracing
    app.middlewares.extend([_outermost(router), _admission(router)])
    app.on_response_prepare.append(_headers(router))


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
        router.metrics.http.labels(path, response.status).inc()
        if not response.prepared:
            response.headers["X-Request-Id"] = request_id
            if router.drain.begun:
                response.force_close()
        return response

    return outermost


def _admission(router: Router) -> Middleware:
    """Who calls, whether they may, and whether now."""

    @web.middleware
    async def admission(request: web.Request, handler: Handler) -> web.StreamResponse:
        path, given = request.path, bearer(request.headers.get("Authorization", ""))
        if path.startswith("/admin/"):
            check_admin(router, request, given)
        elif path not in OPEN:
            caller = request[CALLER] = router.keys.identify(given)
            if path.startswith(MODEL) and request.method == "POST":
                if router.drain.begun:
                    raise Draining("this router is shutting down")
                _admit(router, caller)
        if not request.content.is_eof():
            await _read(request, router.config.body_timeout_s)
        return await handler(request)

    return admission


def _admit(router: Router, caller: Key) -> None:
    try:
        router.limits.admit(caller)
    except RateLimited as error:
        router.metrics.limited.labels(error.limit).inc()
        raise


async def _read(request: web.Request, timeout_s: float) -> None:
    """The body, here so that it has its time; handlers find it read. Raises `SlowClient`."""
    try:
        async with asyncio.timeout(timeout_s):
            await request.read()
    except TimeoutError:
        raise SlowClient(f"the body did not come within {timeout_s:g} s") from None


def _headers(router: Router):  # type: ignore[no-untyped-def]  # aiohttp's signals are typed so
    async def add(request: web.Request, response: web.StreamResponse) -> None:
        """Just before the head is sent, of a stream with its first token."""
        if trace := request.get(TRACE):
            response.headers.setdefault("traceparent", trace.headers.get("traceparent", ""))
        if (receipt := request.get(RECEIPT)) is not None:
            response.headers["Server-Timing"] = server_timing(receipt)
        if caller := request.get(CALLER):
            response.headers.update(router.limits.headers(caller))

    return add


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

"""What precedes every handler: request ids, keys, rate limits, limits of bodies, errors."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Mapping
from types import TracebackType

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from engine.protocol import Draining, Internal, MicroserveError, SlowClient
from engine.web import SAFE_METHODS, AllowedHosts, check_origin, check_place
from router.admission import ANYBODY, Key, Shutdown, bearer
from router.api.admin.access import check_admin
from router.api.errors import error_headers, error_object
from router.api.http import (
    Handler,
    HttpRequest,
    HttpResponse,
    RawHeaders,
    encoded,
    json_response,
)
from router.api.openapi import DOCS
from router.api.parts import Router
from router.api.rest import call_api
from router.api.ui import is_page
from router.base import CancelScope, RateLimited

__all__ = ["Gate"]

log = logging.getLogger(__name__)
# Open to everybody: probes and scrapers have no keys.
OPEN = frozenset({"/health", "/metrics", "/version", "/openapi.json", DOCS})
OPEN_BODY = 1 << 16  # bytes; none of these paths reads its body
# POSTs below this path count for a key's limits, and are refused during shutdown.
MODEL = "/v1/"
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class Gate:
    """The ASGI application in front of a router's API."""

    def __init__(
        self, router: Router, api: FastAPI, handlers: Mapping[tuple[str, str], Handler]
    ) -> None:
        """`handlers`, by method and path, are called directly, and `api` for all else."""
        self._router = router
        self._api = api
        self._handlers = handlers
        config = router.config
        self._max_body = config.max_body_mb << 20
        self._hosts = AllowedHosts.of(config.allowed_hosts, config.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. A client that disconnects cancels it."""
        http = HttpRequest(
            scope, receive, send, max_body=self._max_body, extra_headers=self._headers
        )
        connection = http.connection
        if connection is None:
            await self._serve(http)
            return
        if connection.gone:
            return
        http.task = asyncio.current_task()
        connection.cancels(http.task)
        try:
            await self._serve(http)
        except asyncio.CancelledError:
            if not connection.gone:
                raise

    async def _serve(self, http: HttpRequest) -> None:
        """Run the handler and send its response. Failures become error responses here, except in
        FastAPI's functions, where `rest.catch_errors` handles them."""
        given = http.headers.get("x-request-id")
        if given is None or not _REQUEST_ID.fullmatch(given):
            given = f"{random.getrandbits(128):032x}"
        http.id = given
        try:
            http.check()
            check_place(http.scope)
            self._admit(http)
            if http.caller is not None and _to_model(http):
                await self._limit(http.caller)
            with _Arriving(self._router.shutdown, http):
                await self._read(http)
                handler = self._handlers.get((http.method, http.path))
                if handler is None:
                    await call_api(self._api, http)
                    return
                http.route = http.path
                response = await handler(http)
        except MicroserveError as error:
            response = _error(error)
        except Exception:
            log.exception("request %s failed", http.id)
            response = _error(Internal("the router failed; its log says how"))
        if response is not None and not http.begun:
            await http.respond(response)

    def _headers(self, http: HttpRequest) -> RawHeaders:
        """Return the headers that all responses have.

        Called when the head is sent: a stream's head is sent with its first token.
        """
        router = self._router
        router.metrics.answered(http.route, http.status)
        http.close = http.close or router.shutdown.begun
        headers = [(b"X-Request-Id", http.id.encode())]
        if http.trace is not None:
            parent = http.trace.headers.get("traceparent", "")
            headers.append((b"traceparent", parent.encode("utf-8", "surrogateescape")))
        if http.receipt is not None:
            headers.append((b"Server-Timing", http.receipt.timings().server_timing().encode()))
        if http.caller is not None and (limits := router.limits.headers(http.caller)):
            headers += encoded(limits)
        return headers

    def _admit(self, http: HttpRequest) -> None:
        """Check key and origin, before the body is read.

        Raises `Unauthorized`, `Forbidden`, `UnsupportedMediaType` or `Draining`.
        """
        router, path = self._router, http.path
        given = bearer(http.headers.get("authorization", ""))
        if path.startswith("/admin/"):
            check_admin(router, http, given, self._hosts)
        elif (
            path in OPEN
            or path.startswith(f"{DOCS}/")
            or (is_page(http) and not router.config.no_ui)
        ):
            http.max_body = min(self._max_body, OPEN_BODY)
        else:
            http.caller = router.keys.identify(given)
            self._check_site(http)
            if _to_model(http) and router.shutdown.begun:
                raise Draining("this router is shutting down")

    def _check_site(self, http: HttpRequest) -> None:
        """Raise `Forbidden` for a call that a web page of another site may have made.

        With a key it is no such call.
        """
        keyless = http.caller is ANYBODY
        if keyless or self._hosts.enforced:
            self._hosts.check(http.headers.get("host"))
        if keyless and http.method not in SAFE_METHODS:
            check_origin(http.headers)

    async def _limit(self, caller: Key) -> None:
        """Count the request. Raises `RateLimited`."""
        try:
            await self._router.limits.arrive(caller)
        except RateLimited as error:
            self._router.metrics.limited.labels(error.limit).inc()
            raise

    async def _read(self, http: HttpRequest) -> None:
        """Read the body within its time limit; handlers then have it at once.

        Raises `SlowClient`, and what `HttpRequest.read` raises.
        """
        if http.arrived:  # nearly always: no timer is needed
            await http.read()
            return
        timeout_s = self._router.config.body_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await http.read()
        except TimeoutError:
            raise SlowClient(f"the body did not come within {timeout_s:g} s") from None


class _Arriving:
    """Scope of a request from its head on: shutdown waits for those to the model.

    Once the work on it begins, which shutdown waits for too, `http.counted` ends this. Until then
    shutdown ends the request here, with `Draining`.
    """

    __slots__ = ("_counted", "_http", "_scope", "_shutdown")

    def __init__(self, shutdown: Shutdown, http: HttpRequest) -> None:
        self._shutdown = shutdown
        self._http = http
        self._scope = CancelScope(http.task)
        self._counted = False

    def __enter__(self) -> None:
        if _to_model(self._http):
            self._shutdown.request_begins(self._scope.cancel)
            self._counted = True
            self._http.counted = self._leave
        self._scope.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()
        try:
            self._scope.__exit__(kind, error, traceback)
        except TimeoutError:
            raise Draining("the router shut down before the request had arrived") from None

    def _leave(self) -> None:
        if self._counted:
            self._counted = False
            self._shutdown.request_ends(self._scope.cancel)


def _to_model(http: HttpRequest) -> bool:
    return http.path.startswith(MODEL) and http.method == "POST"


def _error(error: MicroserveError) -> HttpResponse:
    response = json_response(error_object(error), status=error.status)
    response.headers.update(error_headers(error))
    return response

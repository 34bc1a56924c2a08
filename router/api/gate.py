"""What every HTTP request passes on its way in and out: its id, its key, its limits, its errors."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Mapping

from engine.protocol import Draining, Internal, MicroserveError
from router.admission.keys import Key, bearer
from router.api.admin.access import check_admin
from router.api.http import HttpRequest, HttpResponse, json_response
from router.api.openai.errors import error_headers, error_object
from router.api.parts import Router
from router.api.routes import Routes
from router.base.errors import RateLimited, SlowClient

__all__ = ["Gatekeeper"]

log = logging.getLogger(__name__)
# Open to everybody: probes and scrapers have no keys.
OPEN = frozenset({"/health", "/metrics", "/version", "/openapi.json", "/docs"})
# These count for a key's limits, and are not begun any more when the router is to stop.
MODEL = "/v1/"
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class Gatekeeper:
    """Answers all requests, by `routes`."""

    def __init__(self, router: Router, routes: Routes) -> None:
        self._router = router
        self._routes = routes

    async def serve(self, http: HttpRequest) -> None:
        """Answer one. The one place where exceptions become replies."""
        router, path = self._router, "other"
        given = http.headers.get("x-request-id", "")
        http.id = given if _REQUEST_ID.fullmatch(given) else f"{random.getrandbits(128):032x}"
        try:
            if http.error is not None:
                raise http.error
            self._admit(http)
            if not http.complete:
                await self._read(http)
            route = self._routes.find(http)
            path = route.path
            response = await route.handler(http)
        except MicroserveError as error:
            response = _error(error)
        except ConnectionResetError:
            raise
        except Exception:
            log.exception("request %s failed", http.id)
            response = _error(Internal("the router failed; its log says how"))
        router.metrics.answered(path, 200 if response is None else response.status)
        if response is not None and not http.begun:
            response.headers["X-Request-Id"] = http.id
            http.keep_alive = http.keep_alive and not router.shutdown.begun
            http.respond(response)

    def headers(self, http: HttpRequest) -> Mapping[str, str]:
        """Just before the head is sent, of a stream with its first token."""
        headers: dict[str, str] = {}
        if http.trace is not None:
            headers["traceparent"] = http.trace.headers.get("traceparent", "")
        if http.receipt is not None:
            headers["Server-Timing"] = http.receipt.timings().server_timing()
        if http.caller is not None:
            headers.update(self._router.limits.headers(http.caller))
        return headers

    def _admit(self, http: HttpRequest) -> None:
        """Who calls, whether they may, and whether now."""
        router, path = self._router, http.path
        given = bearer(http.headers.get("authorization", ""))
        if path.startswith("/admin/"):
            check_admin(router, http, given)
        elif path not in OPEN:
            http.caller = router.keys.identify(given)
            if path.startswith(MODEL) and http.method == "POST":
                if router.shutdown.begun:
                    raise Draining("this router is shutting down")
                self._limit(http.caller)

    def _limit(self, caller: Key) -> None:
        try:
            self._router.limits.admit(caller)
        except RateLimited as error:
            self._router.metrics.limited.labels(error.limit).inc()
            raise

    async def _read(self, http: HttpRequest) -> None:
        """The body, here so that it has its time; handlers find it read. Raises `SlowClient`."""
        timeout_s = self._router.config.body_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await http.read()
        except TimeoutError:
            raise SlowClient(f"the body did not come within {timeout_s:g} s") from None


def _error(error: MicroserveError) -> HttpResponse:
    response = json_response(error_object(error), status=error.status)
    response.headers.update(error_headers(error))
    return response

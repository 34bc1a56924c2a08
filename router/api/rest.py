"""What FastAPI's functions behind the gate share: the request, replies, error responses."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from engine.protocol import BadRequest, Internal, MicroserveError
from router.api.errors import complaint, error_headers, error_object, not_json
from router.api.http import HttpRequest
from router.base import MethodNotAllowed, NotFound

__all__ = [
    "EVENT_HEADERS",
    "IDLE_S",
    "EventStream",
    "Http",
    "Sent",
    "call_api",
    "catch_errors",
    "reply",
]

IDLE_S = 15.0  # then a stream of events has a comment, so that dead listeners are noticed
EVENT_HEADERS = [(b"Content-Type", b"text/event-stream"), (b"Cache-Control", b"no-cache")]
METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")


def _http(request: Request) -> HttpRequest:
    http: HttpRequest = request.state.http
    return http


# The parameter of a function that needs the request as the gate has seen it.
Http = Annotated[HttpRequest, Depends(_http)]


class Sent(Response):
    """Stands for a response that the function has sent itself."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send nothing more."""


class EventStream(Sent):
    """A stream of server-sent events that the function has sent itself."""

    media_type = "text/event-stream"


def reply(body: Any, *, status: int = 200) -> Response:
    """Return `body` as JSON. Keys of objects may be of any JSON type."""
    content = orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)
    return Response(content, status, media_type="application/json")


async def call_api(api: FastAPI, http: HttpRequest) -> None:
    """Serve `http`, whose body has been read, by `api`."""
    bodies = [await http.read()]

    async def receive() -> Any:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        return await http.receive()  # waits for the client to disconnect

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            http.route = getattr(scope.get("route"), "path_format", http.route)
            await http.begin(message["status"], message["headers"])
        else:
            more = message.get("more_body", False)
            await http.send_body(message.get("body", b""), more=more)

    # Bodies are JSON whatever their Content-Type says. HEAD runs as GET; the server omits the body.
    headers = [header for header in http.scope["headers"] if header[0] != b"content-type"]
    scope = {
        **http.scope,
        "method": "GET" if http.method == "HEAD" else http.method,
        "headers": [*headers, (b"content-type", b"application/json")],
        "state": {"http": http},
    }
    await api(scope, receive, send)


def catch_errors(api: FastAPI) -> None:
    """Register handlers that turn every failure into an OpenAI error object."""

    async def microserve_error(request: Request, error: Exception) -> Response:
        known = error if isinstance(error, MicroserveError) else _unknown()
        response = reply(error_object(known), status=known.status)
        response.headers.update(error_headers(known))
        return response

    async def invalid_body(request: Request, error: Exception) -> Response:
        return await microserve_error(request, _invalid(error))

    async def http_exception(request: Request, error: Exception) -> Response:
        return await microserve_error(request, _of_http(api, request, error))

    api.add_exception_handler(MicroserveError, microserve_error)
    api.add_exception_handler(RequestValidationError, invalid_body)
    api.add_exception_handler(HTTPException, http_exception)
    api.add_exception_handler(Exception, microserve_error)


def _unknown() -> Internal:
    return Internal("the router failed; its log says how")


def _invalid(error: Exception) -> MicroserveError:
    """Return the first of FastAPI's complaints about a request."""
    if not isinstance(error, RequestValidationError):
        return _unknown()
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return not_json(first["ctx"]["error"], first["loc"][1])
    where, *path = first["loc"]
    if where == "body" and not path:
        too_many = first["type"] == "too_many_fields"
        return BadRequest(first["msg"] if too_many else "the body is not a JSON object")
    return complaint(first["msg"], path if where == "body" else first["loc"])


def _of_http(api: FastAPI, request: Request, error: Exception) -> MicroserveError:
    path = request.state.http.path
    if not isinstance(error, HTTPException):
        return _unknown()
    if error.status_code == 404:
        return NotFound(f"no such path: {path}")
    if error.status_code == 405:
        allowed = [
            method
            for method in METHODS
            for route in api.routes
            if route.matches({**request.scope, "method": method})[0] is Match.FULL
        ]
        return MethodNotAllowed(f"{path} takes no {request.state.http.method}", allowed=allowed)
    return BadRequest(str(error.detail))

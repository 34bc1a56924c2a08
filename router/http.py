"""Small things that all HTTP handlers of the router need."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import orjson
from aiohttp import web

__all__ = ["begin_request", "json_response", "off_loop", "request_id", "trace_headers"]

P = ParamSpec("P")
T = TypeVar("T")

# Up to here, reading and tokenizing takes well under a millisecond or two: a thread costs more.
SMALL_BODY = 8 * 1024
_request_id: ContextVar[str] = ContextVar("request_id")
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


async def off_loop(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do `work` on `size` bytes without holding up the event loop: in a thread if there is much."""
    if size <= SMALL_BODY:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def begin_request(http: web.Request) -> str:
    """Take the client's `X-Request-Id`; make one where there is none or an unprintable one."""
    given = http.headers.get("X-Request-Id", "")
    known = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    _request_id.set(known)
    return known


def request_id() -> str:
    """The id of the request that this task serves."""
    return _request_id.get()


def trace_headers(http: web.Request) -> dict[str, str]:
    """What is passed on to the engines on every leg."""
    headers = {"X-Request-Id": request_id()}
    for name in ("traceparent", "tracestate"):
        if value := http.headers.get(name):
            headers[name] = value
    return headers


def json_response(body: Any, *, status: int = 200) -> web.Response:
    return web.Response(
        body=orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS),
        status=status,
        content_type="application/json",
    )

"""Small things that all HTTP handlers of the router need."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import orjson
from aiohttp import web

__all__ = ["json_response", "off_loop", "request_id_of", "trace_headers"]

P = ParamSpec("P")
T = TypeVar("T")

# Up to here, reading and tokenizing takes well under a millisecond or two: a thread costs more.
SMALL_BODY = 8 * 1024
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


async def off_loop(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do `work` on `size` bytes without holding up the event loop: in a thread if there is much."""
    if size <= SMALL_BODY:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def request_id_of(http: web.Request) -> str:
    """The client's `X-Request-Id`, made up where there is none or an unprintable one."""
    known: str | None = http.get("request_id")
    if known is None:
        given = http.headers.get("X-Request-Id", "")
        known = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        http["request_id"] = known
    return known


def trace_headers(http: web.Request) -> dict[str, str]:
    """What is passed on to the engines on every leg."""
    headers = {"X-Request-Id": request_id_of(http)}
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

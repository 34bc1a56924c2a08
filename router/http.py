"""Small things that all HTTP handlers of the router need."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import orjson
from aiohttp import web

from router.keys import Key
from router.receipts import Receipt
from router.trace import Trace, Tracing

__all__ = [
    "CALLER",
    "RECEIPT",
    "TRACE",
    "TRACING",
    "begin_request",
    "json_response",
    "off_loop",
    "request_id",
    "trace_headers",
]

P = ParamSpec("P")
T = TypeVar("T")

CALLER = web.RequestKey("caller", Key)
RECEIPT = web.RequestKey("receipt", Receipt)
TRACE: web.RequestKey[Trace] = web.RequestKey("trace")
TRACING: web.AppKey[Tracing] = web.AppKey("tracing")

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
    known = given if _REQUEST_ID.fullmatch(given) else os.urandom(16).hex()
    _request_id.set(known)
    return known


def request_id() -> str:
    """The id of the request that this task serves."""
    return _request_id.get()


def trace_headers(http: web.Request) -> dict[str, str]:
    """What is passed on to the engines on every leg. The request's span begins here."""
    trace = http[TRACE] = http.app[TRACING].begin(http.headers)
    return {"X-Request-Id": request_id(), **trace.headers}


def json_response(body: Any, *, status: int = 200) -> web.Response:
    return web.Response(
        body=orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS),
        status=status,
        content_type="application/json",
    )

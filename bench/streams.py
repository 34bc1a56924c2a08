"""Streams of events from a server, with the time at which each arrived.

They use the router's own HTTP client: a client that costs much would slow down what it measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import orjson

from router.base.sse import DONE, EventSplitter
from router.engines.http_client import HttpClient

__all__ = ["post_stream"]


async def post_stream(
    client: HttpClient, path: str, body: dict[str, Any], on_event: Callable[[Any, float], None]
) -> None:
    """POST `body` and call `on_event(event, perf_counter)` for each event of the reply.

    Raises `RuntimeError` if the server refuses, or reports an error in the stream. Cancellation
    closes the connection.
    """
    splitter = EventSplitter()
    errors: list[Any] = []

    def feed(received: bytes) -> None:
        now = time.perf_counter()
        for data in splitter.feed(received):
            if data == DONE:
                continue
            event = orjson.loads(data)
            if "error" in event:
                errors.append(event["error"])
            else:
                on_event(event, now)

    reply = await client.call("POST", path, orjson.dumps(body), sink=feed)
    if reply.status != 200:
        raise RuntimeError(f"{client.url}{path}: {reply.status} {reply.body[:200]!r}")
    if errors:
        raise RuntimeError(f"{client.url}{path}: {errors[0]}")

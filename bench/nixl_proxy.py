"""A proxy for two of vLLM's servers with its `NixlConnector`: prefill on one, decode on the other.

vLLM leaves this part to its users. As in its own example, a request goes to the first server with
`max_tokens` 1; what that says about its blocks (`kv_transfer_params`) goes to the second with the
request itself, and the second's answer to the client as it arrives.

Run by `bench.nixl_arm`: `python -m bench.nixl_proxy PORT PREFILL_URL DECODE_URL`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from router.engines.http_client import HttpClient, Reply

COMPLETIONS = "/v1/completions"
REMOTE_DECODE = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip


def application(prefill_url: str, decode_url: str) -> Starlette:
    """Return the proxy."""
    prefill, decode = (HttpClient(url, connect_timeout_s=30.0) for url in (prefill_url, decode_url))

    async def completions(request: Request) -> Response:
        body: dict[str, Any] = orjson.loads(await request.body())
        first = {key: value for key, value in body.items() if key != "stream_options"}
        first |= {"max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE_DECODE}
        reply = await prefill.call("POST", COMPLETIONS, orjson.dumps(first))
        if reply.status != 200:
            return Response(reply.body, reply.status)
        body["kv_transfer_params"] = orjson.loads(reply.body)["kv_transfer_params"]
        return StreamingResponse(answer(decode, orjson.dumps(body)), media_type="text/event-stream")

    async def health(_: Request) -> Response:
        return Response()

    return Starlette(routes=[
        Route(COMPLETIONS, completions, methods=["POST"]),
        Route("/health", health),
    ])  # fmt: skip


async def answer(server: HttpClient, body: bytes) -> AsyncIterator[bytes]:
    """Yield the bytes of a streamed answer. Raises `RuntimeError` if the server refuses."""
    pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def call() -> Reply:
        try:
            return await server.call("POST", COMPLETIONS, body, sink=pieces.put_nowait)
        finally:
            pieces.put_nowait(None)

    calling = asyncio.ensure_future(call())
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        reply = await calling
        if reply.status != 200:
            raise RuntimeError(f"{server.url}: {reply.status} {reply.body[:500]!r}")
    finally:
        calling.cancel()


def main() -> None:
    port, prefill_url, decode_url = sys.argv[1:]
    uvicorn.run(
        application(prefill_url, decode_url), host="127.0.0.1", port=int(port), log_level="warning"
    )


if __name__ == "__main__":
    main()

"""The microserving REST API. Every failure has the error body of the protocol."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Route

from engine.api.docs import add_docs
from engine.api.gate import Gate
from engine.api.requests import DirectRoute, error_headers, read_body, unless_disconnected
from engine.api.served_engine import ServedEngine
from engine.api.stream_routes import add_stream_routes
from engine.api.streaming import event_stream
from engine.protocol import (
    TIMELINE_S,
    BadRequest,
    Commit,
    EngineConfig,
    EngineState,
    EngineStatistics,
    EngineTimeline,
    Extend,
    ExtendReply,
    Internal,
    LendAllocate,
    LendAllocateReply,
    LendCreditors,
    LendCreditorsReply,
    LendFree,
    LendFreeReply,
    LendHome,
    LendHomeReply,
    LendRenew,
    LendRenewReply,
    LendSend,
    LendSendReply,
    MicroserveError,
    MirrorGeneration,
    ModelInfo,
    Pin,
    PrepRecv,
    PrepRecvReply,
    Release,
    RemoteSend,
    RemoteSendReply,
    StartGenerate,
    Unsupported,
    error_body,
    parse,
)
from engine.service import Lending, MicroserveEngine, NativeEngine

__all__ = ["build_api", "build_app"]

log = logging.getLogger(__name__)

Handler = TypeVar("Handler", bound=Callable[..., Any])


def build_app(engine: MicroserveEngine, config: EngineConfig, epoch: int) -> Gate:
    """Return the HTTP application of one of this project's own engines."""
    return Gate(build_api(NativeEngine(engine, config, epoch), config), config)


def build_api(engine: ServedEngine, config: EngineConfig) -> FastAPI:
    """Return the routes of one engine, without the gate before them."""
    app = FastAPI(
        title="microserve engine",
        version=version("microserve"),
        docs_url=None,
        redoc_url=None,
    )
    add_docs(app)
    for kind in (MicroserveError, HTTPException, Exception):
        app.add_exception_handler(kind, _reply_error)

    def post(
        path: str, message: type[BaseModel], reply: type[BaseModel] | None = None
    ) -> Callable[[Handler], Handler]:
        """Route a call whose body is a `message`; the handler reads and validates it."""
        schema = {"content": {"application/json": {"schema": message.model_json_schema()}}}
        return app.post(
            f"/microserving/{path}",
            response_model=reply,
            openapi_extra={"requestBody": {"required": True, **schema}},
        )

    limit = config.max_body_mb << 20

    @post("prep_recv", PrepRecv, PrepRecvReply)
    async def prep_recv(request: Request) -> PrepRecvReply:
        """Match `prompt[:end]` against the prefix cache and allocate pages for the rest."""
        call = parse(PrepRecv, await read_body(request, limit))
        await unless_disconnected(request, engine.promote(call.prompt))
        return await engine.prep_recv(call)

    @post("remote_send", RemoteSend, RemoteSendReply)
    async def remote_send(request: Request) -> RemoteSendReply:
        """Put the KV of `prompt[begin:end]` into a peer. Responds when it has landed."""
        call = parse(RemoteSend, await read_body(request, limit))
        return await unless_disconnected(request, engine.remote_send(call))

    @post("start_generate", StartGenerate)
    async def start_generate(request: Request) -> Response:
        """Generate; events come as server-sent events or on a multiplexed stream."""
        call = parse(StartGenerate, await read_body(request, limit))
        mux = engine.muxes[call.stream_id] if call.stream == "mux" else None
        starting = engine.start_generate(call)
        if engine.may_wait(call):
            stream = await unless_disconnected(request, starting)
        else:
            stream = await starting
        if mux is None:
            return event_stream(stream)
        mux.subscribe(call.request_id, stream, call.stream_tokens, call.stream_ms / 1e3)
        return JSONResponse({"request_id": call.request_id})

    # The route above documents the call; this one, which comes first, serves it.
    direct = DirectRoute(start_generate)
    app.router.routes.insert(0, Route("/microserving/start_generate", direct, methods=["POST"]))
    add_stream_routes(app, engine.muxes, engine.prefixes)

    @post("mirror", MirrorGeneration)
    async def mirror(request: Request) -> dict[str, bool]:
        """Mirror a running generation's KV into a peer's lease, in place of its earlier mirror."""
        await engine.mirror(parse(MirrorGeneration, await read_body(request, limit)))
        return {"mirrored": True}

    @post("extend", Extend, ExtendReply)
    async def extend(request: Request) -> ExtendReply:
        """Make more room in a lease, for a sequence that is mirrored into it."""
        return await engine.extend(parse(Extend, await read_body(request, limit)))

    @post("commit", Commit)
    async def commit(request: Request) -> dict[str, int]:
        """Publish a landed lease's KV to the prefix cache."""
        lease_id = parse(Commit, await read_body(request, limit)).lease_id
        return {"committed_tokens": await engine.commit(lease_id)}

    @post("pin", Pin)
    async def pin(request: Request) -> dict[str, int]:
        """Protect the cached part of a prompt from eviction."""
        call = parse(Pin, await read_body(request, limit))
        return {"pinned_tokens": await engine.pin(call)}

    @post("unpin", Pin)
    async def unpin(request: Request) -> dict[str, int]:
        """End the protection of a prompt. Idempotent."""
        call = parse(Pin, await read_body(request, limit))
        return {"unpinned_tokens": await engine.unpin(call)}

    @post("release", Release)
    async def release(request: Request) -> dict[str, bool]:
        """End a lease, or abort everything under a request id. Idempotent.

        With a request id, responds when the full pages of its generation are in the prefix cache.
        """
        await engine.release(parse(Release, await read_body(request, limit)))
        return {"released": True}

    def lending() -> Lending:
        if engine.lending is None:
            raise Unsupported("this engine lends no pages")
        return engine.lending

    @post("lend/allocate", LendAllocate, LendAllocateReply)
    async def lend_allocate(request: Request) -> LendAllocateReply:
        """Lend pages to another engine. Without room the answer is `granted: false`, no error."""
        return lending().allocate(parse(LendAllocate, await read_body(request, limit)))

    @post("lend/free", LendFree, LendFreeReply)
    async def lend_free(request: Request) -> LendFreeReply:
        """Take back pages of a loan, or all of it. Idempotent."""
        return lending().free(parse(LendFree, await read_body(request, limit)))

    @post("lend/renew", LendRenew, LendRenewReply)
    async def lend_renew(request: Request) -> LendRenewReply:
        """Renew loans, and tell which of them are called back or have ended."""
        return lending().renew(parse(LendRenew, await read_body(request, limit)))

    @post("lend/send", LendSend, LendSendReply)
    async def lend_send(request: Request) -> LendSendReply:
        """Put the KV of lent pages into the debtor's own; responds when it has landed."""
        return await lending().send(parse(LendSend, await read_body(request, limit)))

    @post("lend/creditors", LendCreditors, LendCreditorsReply)
    async def lend_creditors(request: Request) -> LendCreditorsReply:
        """Tell an engine that borrows whom to ask, in place of the list before."""
        call = parse(LendCreditors, await read_body(request, limit))
        if engine.borrowing is None:
            raise Unsupported("this engine does not borrow")
        return LendCreditorsReply(creditors=engine.borrowing.set_creditors(call))

    @post("lend/home", LendHome, LendHomeReply)
    async def lend_home(request: Request) -> LendHomeReply:
        """Bring blocks home from a creditor; responds when they are here, or the time is over."""
        call = parse(LendHome, await read_body(request, limit))
        if engine.home_orders is None:
            raise Unsupported("this engine does not borrow")
        return await engine.home_orders.run(call)

    @app.get("/microserving/model")
    async def model() -> ModelInfo:
        """Describe the model, for routers."""
        return engine.model_info()

    @app.get("/microserving/state")
    async def state() -> EngineState:
        """Return pages, leases and queues as they are now."""
        return engine.state()

    async def state_directly(_: Request) -> Response:
        return Response(engine.state().model_dump_json(), media_type="application/json")

    # Every router asks twice a second. The route above documents the call; this one serves it.
    asked = DirectRoute(state_directly)
    app.router.routes.insert(0, Route("/microserving/state", asked, methods=["GET"]))

    @app.get("/microserving/statistics")
    async def statistics() -> EngineStatistics:
        """Return how long this engine's own steps and puts took lately."""
        return engine.statistics()

    @app.get("/microserving/timeline", response_model=EngineTimeline)
    async def timeline(seconds: str = "60") -> Response:
        """Return the steps and puts of the latest `seconds`; with 0, only what its clock says."""
        most = _timeline_seconds(seconds)
        if not most:
            told = engine.timeline(0.0).model_dump_json()
        else:  # megabytes
            told = await asyncio.to_thread(lambda: engine.timeline(most).model_dump_json())
        return Response(told, media_type="application/json")

    @app.get("/microserving/integrity")
    async def integrity() -> dict[str, bool]:
        """Verify that every page has exactly the owner that the bookkeeping says; 500 if not."""
        await engine.check_integrity()
        return {"ok": True}

    @app.get("/health")
    async def health() -> Response:
        """Return 200 while the step loop makes progress."""
        engine.check_health()
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics in the Prometheus text format."""
        return Response(engine.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.get("/version")
    async def version_() -> dict[str, str]:
        """Return the version of this package."""
        return {"version": version("microserve")}

    return app


def _timeline_seconds(text: str) -> float:
    """Return the number. Raises `BadRequest` unless it is one from 0 to `TIMELINE_S`."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= TIMELINE_S:
        what = f"seconds is a number from 0 to {TIMELINE_S:g}; not {text!r:.80}"
        raise BadRequest(what, param="seconds")
    return seconds


async def _reply_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        wrapped = {"type": "bad_request", "message": error.detail, "param": None, "code": None}
        return JSONResponse({"error": wrapped}, error.status_code)
    if not isinstance(error, MicroserveError):
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        error = Internal(f"{type(error).__name__}: {error}")
    return JSONResponse(error_body(error), error.status, error_headers(error))

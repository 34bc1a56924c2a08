"""The microserving REST API. Every failure has the one error body of the protocol."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine.api.mux_response import add_stream
from engine.api.sse import event_stream
from engine.protocol import (
    BadRequest,
    Commit,
    EngineState,
    Extend,
    ExtendReply,
    Internal,
    Lease,
    MicroserveError,
    MirrorGeneration,
    ModelInfo,
    NoCapacity,
    PageCounts,
    Pin,
    PrepRecv,
    PrepRecvReply,
    Release,
    RemoteSend,
    RemoteSendReply,
    StartGenerate,
    TierCounts,
    TooLarge,
    Unauthorized,
    error_body,
    parse,
)
from engine.protocol.config import EngineConfig
from engine.service.engine import MicroserveEngine
from engine.service.prefix_feed import add_prefixes

__all__ = ["build_app"]

log = logging.getLogger(__name__)

STUCK_S = 60.0  # a step that takes longer than this is taken for a hang
T = TypeVar("T")
Handler = TypeVar("Handler", bound=Callable[..., Any])


def build_app(engine: MicroserveEngine, config: EngineConfig, epoch: int) -> FastAPI:
    """The HTTP side of one engine."""
    app = FastAPI(
        title="microserve engine",
        version=version("microserve"),
        dependencies=[Depends(_authorize(config.api_key))],
    )
    for kind in (MicroserveError, HTTPException, Exception):
        app.add_exception_handler(kind, _reply_error)

    def post(
        path: str, message: type[BaseModel], reply: type[BaseModel] | None = None
    ) -> Callable[[Handler], Handler]:
        """Route a call whose body is `message`, read strictly and within the size limit."""
        schema = {"content": {"application/json": {"schema": message.model_json_schema()}}}
        return app.post(
            f"/microserving/{path}",
            response_model=reply,
            openapi_extra={"requestBody": {"required": True, **schema}},
        )

    limit = config.max_body_mb << 20

    @post("prep_recv", PrepRecv, PrepRecvReply)
    async def prep_recv(request: Request) -> PrepRecvReply:
        """Match `prompt[:end]` against the prefix cache and make room for the rest."""
        call = parse(PrepRecv, await _body(request, limit))
        await _unless_disconnected(request, engine.recall(call.prompt))
        return engine.prep_recv(call)

    @post("remote_send", RemoteSend, RemoteSendReply)
    async def remote_send(request: Request) -> RemoteSendReply:
        """Put the KV of `prompt[begin:end]` into a peer; answers when it has landed."""
        call = parse(RemoteSend, await _body(request, limit))
        return await _unless_disconnected(request, engine.remote_send(call))

    @post("start_generate", StartGenerate)
    async def start_generate(request: Request) -> Response:
        """Generate, as server-sent events or on a multiplexed stream."""
        call = parse(StartGenerate, await _body(request, limit))
        mux = engine.muxes[call.stream_id] if call.stream == "mux" else None
        starting = engine.start_generate(call)
        if engine.may_wait(call):
            stream = await _unless_disconnected(request, starting)
        else:
            stream = await starting
        if mux is None:
            return event_stream(stream)
        mux.deliver(call.request_id, stream, call.stream_tokens, call.stream_ms / 1e3)
        return JSONResponse({"request_id": call.request_id})

    start = _Direct(start_generate, _authorize(config.api_key))
    app.router.routes.insert(0, Route("/microserving/start_generate", start, methods=["POST"]))
    add_stream(app, engine.muxes)
    add_prefixes(app, engine.prefixes)

    @post("mirror", MirrorGeneration)
    async def mirror(request: Request) -> dict[str, bool]:
        """Keep a replica of a running generation's KV, in place of the one that it has."""
        engine.mirror(parse(MirrorGeneration, await _body(request, limit)))
        return {"mirrored": True}

    @post("extend", Extend, ExtendReply)
    async def extend(request: Request) -> ExtendReply:
        """More room in a lease, for a sequence that is mirrored into it."""
        return engine.extend(parse(Extend, await _body(request, limit)))

    @post("commit", Commit)
    async def commit(request: Request) -> dict[str, int]:
        """Publish a landed lease's KV to the prefix cache."""
        lease_id = parse(Commit, await _body(request, limit)).lease_id
        return {"committed_tokens": engine.commit(lease_id)}

    @post("pin", Pin)
    async def pin(request: Request) -> dict[str, int]:
        """Keep what is cached of a prompt from eviction."""
        return {"pinned_tokens": engine.pin(parse(Pin, await _body(request, limit)))}

    @post("unpin", Pin)
    async def unpin(request: Request) -> dict[str, int]:
        """Keep it no longer; idempotent."""
        return {"unpinned_tokens": engine.unpin(parse(Pin, await _body(request, limit)))}

    @post("release", Release)
    async def release(request: Request) -> dict[str, bool]:
        """End a lease, or abort what runs under a request id; idempotent. Answers when its pages
        are let go, and can be found in the prefix cache."""
        call = parse(Release, await _body(request, limit))
        engine.release(call)
        if call.request_id is not None:
            await engine.let_go()
        return {"released": True}

    @app.get("/microserving/model")
    async def model() -> ModelInfo:
        """What a router needs to know of the model."""
        loaded, layout = engine.model, engine.cache.layout
        return ModelInfo(
            name=config.model,
            context_length=loaded.config.context_length,
            vocab_size=loaded.config.vocab_size,
            eos_token_ids=list(loaded.eos_token_ids),
            bos_token=loaded.bos_token,
            eos_token=loaded.eos_token,
            tokenizer_json=loaded.tokenizer_json,
            chat_template=loaded.chat_template,
            fingerprint=engine.cache.identity.fingerprint,
            page_size=layout.page_size,
            kv_bytes_per_token=layout.layers * layout.token_bytes,
            add_bos=loaded.add_bos,
        )

    @app.get("/microserving/state")
    async def state() -> EngineState:
        """Pages, leases and queues, as they are now."""
        cache, use = engine.cache, engine.cache.page_use()
        now = time.monotonic()
        return EngineState(
            engine_id=config.engine_id,
            epoch=epoch,
            role=config.role,
            model=config.model,
            page_size=cache.layout.page_size,
            pages=PageCounts(
                total=use.total,
                free=use.free,
                cached=use.cached,
                leased=use.leased,
                active=use.active,
                quarantined=use.quarantined,
                pinned=use.pinned,
            ),
            running=engine.running,
            waiting=engine.waiting,
            leases=[
                Lease(
                    lease_id=lease.lease_id,
                    request_id=lease.request_id,
                    state=lease.state,
                    begin=lease.begin,
                    end=lease.end,
                    landed=lease.landed,
                    expires_ms=max(round((lease.deadline - now) * 1000), 0),
                )
                for lease in cache.leases()
            ],
            puts_in_flight=engine.puts_in_flight,
            prefix_tokens=cache.prefix_tokens,
            tiers=[TierCounts(**dataclasses.asdict(tier)) for tier in cache.tier_use()],
            draining=engine.draining,
        )

    @app.get("/microserving/integrity")
    async def integrity() -> dict[str, bool]:
        """Prove that every page has exactly the owner that the books say; 500 if not."""
        engine.cache.check_integrity()
        return {"ok": True}

    @app.get("/health")
    async def health() -> Response:
        """200 while the step loop makes progress."""
        still = time.monotonic() - engine.loop.progress
        if not engine.loop.alive or still > STUCK_S:
            raise Internal(f"the step loop has not moved for {still:.0f} s")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(engine.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.get("/version")
    async def version_() -> dict[str, str]:
        """The version of this package."""
        return {"version": version("microserve")}

    return app


def _authorize(api_key: str) -> Callable[[Request], Awaitable[None]]:
    async def check(request: Request) -> None:
        if not api_key or request.url.path == "/health":
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {api_key}".encode()):
            raise Unauthorized("a valid API key is needed: Authorization: Bearer KEY")

    return check


class _Direct:
    """A handler without what FastAPI does for each call, which is on the way to each first token;
    the same is routed with it too, for the documentation."""

    def __init__(
        self,
        handler: Callable[[Request], Awaitable[Response]],
        check: Callable[[Request], Awaitable[None]],
    ) -> None:
        self._handler = handler
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        await self._check(request)
        response = await self._handler(request)
        await response(scope, receive, send)


async def _body(request: Request, limit: int) -> bytes:
    """The request's body. Raises `TooLarge` as soon as it is known to be over `limit` bytes."""
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise TooLarge(f"the body has {declared} bytes, more than {limit}")
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                raise TooLarge(f"the body has more than {limit} bytes")
    except ClientDisconnect:
        raise BadRequest("the caller went away") from None
    return bytes(body)


async def _unless_disconnected(request: Request, call: Coroutine[Any, Any, T]) -> T:
    """Run a call, and cancel it when the caller goes away."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_outcome(call))
        watch = group.create_task(_cancel_on_disconnect(request, task))
        await asyncio.wait((task,))  # raises nothing: an error in here would come as a group
        watch.cancel()
    if task.cancelled():
        raise BadRequest("the caller went away")
    outcome = task.result()
    if isinstance(outcome, MicroserveError):
        raise outcome
    return outcome


async def _outcome(call: Coroutine[Any, Any, T]) -> T | MicroserveError:
    """A call's result, or its error as a value: raised, it would come wrapped in a group."""
    try:
        return await call
    except MicroserveError as error:
        return error


async def _cancel_on_disconnect(request: Request, task: asyncio.Task[Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    task.cancel()


async def _reply_error(request: Request, error: Exception) -> Response:
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        wrapped = {"type": "bad_request", "message": error.detail, "param": None, "code": None}
        return JSONResponse({"error": wrapped}, error.status_code)
    if not isinstance(error, MicroserveError):
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        error = Internal(f"{type(error).__name__}: {error}")
    if isinstance(error, NoCapacity):
        headers["Retry-After"] = str(max(round(error.retry_after_s), 1))
    return JSONResponse(error_body(error), error.status, headers)

"""`/v1/completions` of a mock engine, for routers without microserving calls.

Benchmarks measure such routers in front of the same processes as this project's. It is no complete
OpenAI server: it reads `prompt`, `max_tokens`, `stream` and `stop` of a request.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, ValidationError

from engine.api.app import build_api
from engine.api.gate import Gate
from engine.api.streaming import event_stream
from engine.protocol import (
    EngineConfig,
    MicroserveError,
    StartGenerate,
    Usage,
    bad_request,
    error_body,
    parse,
)
from engine.service import GenerationStream, MicroserveEngine, NativeEngine

__all__ = ["build_mock_app"]

_numbers = itertools.count(1)


class _Completion(BaseModel):
    model_config = ConfigDict(extra="ignore")

    prompt: str | list[int]
    max_tokens: int = 16
    stream: bool = False
    stop: list[str] = []


def build_mock_app(engine: MicroserveEngine, config: EngineConfig, epoch: int) -> Gate:
    """Return the HTTP application of a mock engine: any engine's, and two OpenAI routes."""
    app = build_api(NativeEngine(engine, config, epoch), config)
    model = config.model

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Return one completion, whole or as server-sent events."""
        wanted = parse(_Completion, await request.body())
        prompt = wanted.prompt
        if isinstance(prompt, str):
            prompt = engine.tokenizer.encode(prompt).ids
        try:
            call = StartGenerate(
                request_id=f"cmpl-{next(_numbers)}",
                prompt=prompt,
                max_tokens=wanted.max_tokens,
                stop=wanted.stop,
                ignore_eos=True,
                temperature=0.0,
            )
        except ValidationError as error:
            raise bad_request(error) from None
        stream = await engine.start_generate(call)
        base = {
            "id": call.request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        if wanted.stream:
            return event_stream(stream, _events(stream, base))
        return await _whole(stream, base)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the one model."""
        card = {"id": model, "object": "model", "created": 0, "owned_by": "microserve"}
        return {"object": "list", "data": [card]}

    return Gate(app, config)


async def _whole(stream: GenerationStream, base: dict[str, Any]) -> Response:
    texts, finish, usage = [], None, None
    async for event in stream.events():
        texts.append(event.text)
        finish, usage = event.finish_reason, event.usage
    choice = {"index": 0, "text": "".join(texts), "logprobs": None, "finish_reason": finish}
    body = {**base, "choices": [choice], "usage": _usage(usage)}
    return Response(orjson.dumps(body), media_type="application/json")


async def _events(stream: GenerationStream, base: dict[str, Any]) -> AsyncIterator[bytes]:
    head = b"data: " + orjson.dumps(base)[:-1]
    try:
        async for event in stream.events():
            choice = {
                "index": 0,
                "text": event.text,
                "logprobs": None,
                "finish_reason": event.finish_reason,
            }
            yield b'%b,"choices":[%b]}\n\n' % (head, orjson.dumps(choice))
        yield b"data: [DONE]\n\n"
    except MicroserveError as error:
        yield b"data: %b\n\n" % orjson.dumps(error_body(error))


def _usage(usage: Usage | None) -> dict[str, int]:
    prompt, completion = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }

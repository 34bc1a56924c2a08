"""`/v1/completions` and `/v1/chat/completions`: the hot path, and its description."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Response

from router.api.http import Handler, HttpRequest, HttpResponse
from router.api.openai.answer import chat_completions, completions
from router.api.openai.replies import ChatReply, CompletionReply
from router.api.openai.schemas import ChatRequest, CompletionRequest
from router.api.openapi import api_router, errors, raw_body
from router.api.parts import Router
from router.api.rest import Http, Sent

__all__ = ["handlers", "routes"]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DESCRIBED = {
    COMPLETIONS: (completions, CompletionRequest, CompletionReply),
    CHAT: (chat_completions, ChatRequest, ChatReply),
}
ERRORS = (404, 429, 500, 502, 503, 504)  # of requests that engines work on


def handlers(router: Router) -> dict[tuple[str, str], Handler]:
    """Return the handlers by method and path. The gate calls them without FastAPI."""

    def bound(path: str) -> Handler:
        answer = DESCRIBED[path][0]

        def handler(http: HttpRequest) -> Awaitable[HttpResponse | None]:
            return answer(router, http)

        return handler

    return {("POST", path): bound(path) for path in DESCRIBED}


def routes(router: Router) -> APIRouter:
    """Return the same handlers as routes, for their description in `/openapi.json`."""
    api = api_router("OpenAI")
    for (method, path), handler in handlers(router).items():
        answer, body, reply = DESCRIBED[path]
        endpoint = _endpoint(handler)
        endpoint.__doc__ = answer.__doc__
        api.add_api_route(
            path,
            endpoint,
            methods=[method],
            response_model=reply,
            responses={200: {"content": {"text/event-stream": {}}}, **errors(*ERRORS)},
            openapi_extra=raw_body(body),
        )
    return api


def _endpoint(handler: Handler) -> Callable[..., Awaitable[Response]]:
    async def endpoint(http: Http) -> Response:
        answer = await handler(http)
        if answer is None:
            return Sent()
        return Response(answer.body, answer.status, answer.headers, answer.media)

    return endpoint

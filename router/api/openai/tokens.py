"""`/tokenize` and `/detokenize`, compatible with vLLM."""

from __future__ import annotations

from fastapi import APIRouter, Response
from typing_extensions import TypedDict

from router.api.http import off_loop
from router.api.openai.models import served_name
from router.api.openai.parsing import check_model, load, read_body, read_messages
from router.api.openai.schemas import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from router.api.openapi import api_router, errors, raw_body
from router.api.parts import Router
from router.api.rest import Http, reply
from router.model import ServedModel

__all__ = ["routes"]


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    prompt: str


def routes(router: Router) -> APIRouter:
    """Return `/tokenize` and `/detokenize`."""
    api = api_router("OpenAI")

    @api.post(
        "/tokenize",
        response_model=Tokenized,
        responses=errors(404, 503),
        openapi_extra=raw_body(TokenizeRequest | TokenizeChatRequest),
    )
    async def tokenize(http: Http) -> Response:
        """The token ids of a prompt, or of a conversation."""
        body, model = await http.read(), router.registry.model
        return reply(await off_loop(len(body), _tokenize, body, model, served_name(router)))

    @api.post(
        "/detokenize",
        response_model=Detokenized,
        responses=errors(404, 503),
        openapi_extra=raw_body(DetokenizeRequest),
    )
    async def detokenize(http: Http) -> Response:
        """The text of token ids."""
        body, model = await http.read(), router.registry.model
        return reply(await off_loop(len(body), _detokenize, body, model, served_name(router)))

    return api


def _tokenize(body: bytes, model: ServedModel, name: str) -> Tokenized:
    fields = load(body)
    request: TokenizeRequest | TokenizeChatRequest
    if "messages" in fields:
        request = read_body(TokenizeChatRequest, fields)
        check_model(request.model, name)
        tokens = read_messages(
            fields,
            model,
            add_generation_prompt=request.add_generation_prompt,
            template_kwargs=request.chat_template_kwargs,
        )
    else:
        request = read_body(TokenizeRequest, fields)
        check_model(request.model, name)
        tokens = model.encode(request.prompt, special=request.add_special_tokens)
    return {
        "count": len(tokens),
        "max_model_len": model.context_length,
        "tokens": tokens,
        "token_strs": model.pieces(tokens) if request.return_token_strs else None,
    }


def _detokenize(body: bytes, model: ServedModel, name: str) -> Detokenized:
    request = read_body(DetokenizeRequest, load(body))
    check_model(request.model, name)
    if request.tokens:
        model.check(request.tokens, param="tokens")
    return {"prompt": model.decode(request.tokens)}

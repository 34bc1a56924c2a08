"""`/tokenize` and `/detokenize`, as vLLM has them."""

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
from router.model.served import ServedModel

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
    api = api_router()

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
    asked: TokenizeRequest | TokenizeChatRequest
    if "messages" in fields:
        asked = read_body(TokenizeChatRequest, fields)
        check_model(asked.model, name)
        tokens = read_messages(
            fields,
            model,
            add_generation_prompt=asked.add_generation_prompt,
            template_kwargs=asked.chat_template_kwargs,
        )
    else:
        asked = read_body(TokenizeRequest, fields)
        check_model(asked.model, name)
        tokens = model.encode(asked.prompt, special=asked.add_special_tokens)
    return {
        "count": len(tokens),
        "max_model_len": model.info.context_length,
        "tokens": tokens,
        "token_strs": model.pieces(tokens) if asked.return_token_strs else None,
    }


def _detokenize(body: bytes, model: ServedModel, name: str) -> Detokenized:
    asked = read_body(DetokenizeRequest, load(body))
    check_model(asked.model, name)
    if asked.tokens:
        model.check(asked.tokens, param="tokens")
    return {"prompt": model.decode(asked.tokens)}

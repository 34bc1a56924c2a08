"""Parses the bodies of `/v1/completions` and `/v1/chat/completions`: from bytes to token ids.

Known fields that the engines do not support are refused, never ignored. Unknown fields are ignored.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from engine.protocol import BadRequest, Sampling
from router.api.errors import invalid, not_json
from router.api.openai.schemas import ChatRequest, CompletionRequest, GenerateRequest
from router.api.openai.structure import read_structure
from router.base import ModelNotFound
from router.model import ServedModel

__all__ = [
    "ParsedRequest",
    "check_model",
    "load",
    "read_body",
    "read_chat",
    "read_completion",
    "read_messages",
]

MAX_SEQUENCES = 1024  # prompts × n of one request
MAX_DIGITS = 20  # of a token id; int() refuses thousands, and takes long before that


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A client's request. Choice `i` of prompt `p` has the index `p * n + i`."""

    prompts: list[list[int]]
    samplings: list[Sampling]  # one per prompt: `max_tokens` may depend on its length
    n: int
    stream: bool
    include_usage: bool
    return_token_ids: bool
    echo: bool = False
    priority: int | None = None  # in the queue: lower is earlier
    timeout: float | None = None  # seconds for the whole request


B = TypeVar("B", bound=BaseModel)

# Fields with the same meaning in `Sampling`.
_SAMPLING = frozenset({
    "min_tokens", "temperature", "top_p", "min_p", "seed", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "presence_penalty",
    "frequency_penalty", "repetition_penalty",
})  # fmt: skip

# Fields that are not supported and would change the answer: name → whether a value is harmless.
_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "suffix": lambda value: value == "",
    "tools": lambda value: value == [],
    "tool_choice": lambda value: value in ("none", "auto"),
    "functions": lambda value: value == [],
    "function_call": lambda value: value in ("none", "auto"),
    "modalities": lambda value: value == ["text"],
    "use_beam_search": lambda value: value is False,
    "continue_final_message": lambda value: value is False,
    **dict.fromkeys(
        (
            "audio", "chat_template", "prediction", "prompt_embeds", "prompt_logprobs",
            "web_search_options",
        ),
        lambda value: False,
    ),
}  # fmt: skip


def load(body: bytes) -> dict[str, Any]:
    """Return a JSON object. Raises `BadRequest` for anything else."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise not_json(error.msg, error.pos) from None
    if not isinstance(fields, dict):
        raise BadRequest("the body is not a JSON object")
    return fields


def read_body(kind: type[B], fields: dict[str, Any]) -> B:
    """Return the validated body. Raises `BadRequest`, naming the first bad field."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise invalid(error) from None


def check_model(requested: str | None, served: str) -> None:
    """Raise `ModelNotFound` if `requested` is another model. None means whichever is served."""
    if requested is not None and requested != served:
        message = f"the model {requested[:200]!r} is not served here, but {served!r} is"
        raise ModelNotFound(message, param="model")


def read_completion(body: bytes, model: ServedModel, name: str) -> ParsedRequest:
    """Parse a body. `name` is what the model is served as. The time grows with the prompt.

    Raises `BadRequest` and `ModelNotFound`.
    """
    fields = load(body)
    request = _read(CompletionRequest, fields, name)
    n = request.n or 1
    if request.best_of is not None and request.best_of != n:
        raise _unsupported("best_of", "best_of other than n is not supported")
    if request.echo and request.logprobs is not None:
        raise _unsupported("echo", "echo is not supported together with logprobs")
    prompts = _prompts(request.prompt, model)
    return _parsed(
        request, model, prompts, request.max_tokens or 16, request.logprobs, echo=request.echo
    )


def read_chat(body: bytes, model: ServedModel, name: str) -> ParsedRequest:
    """Parse a body. `name` is what the model is served as. The time grows with the prompt.

    Raises `BadRequest` and `ModelNotFound`.
    """
    fields = load(body)
    request = _read(ChatRequest, fields, name)
    if request.top_logprobs is not None and not request.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    limit, other = request.max_completion_tokens, request.max_tokens
    if limit is not None and other is not None and limit != other:
        raise BadRequest(
            "max_tokens is the old name of max_completion_tokens: give one of them",
            param="max_tokens",
            code="invalid_parameter_combination",
        )
    tokens = read_messages(
        fields,
        model,
        add_generation_prompt=request.add_generation_prompt,
        template_kwargs=request.chat_template_kwargs,
    )
    return _parsed(request, model, [tokens], limit or other, logprobs)


def read_messages(
    fields: dict[str, Any],
    model: ServedModel,
    *,
    add_generation_prompt: bool,
    template_kwargs: dict[str, Any] | None,
) -> list[int]:
    """Return the token ids of a validated conversation. Raises `BadRequest`."""
    if len(fields["messages"]) > model.context_length:  # each message takes a token or more
        raise BadRequest(
            f"{len(fields['messages'])} messages exceed the context of "
            f"{model.context_length} tokens",
            param="messages",
            code="context_length_exceeded",
        )
    messages = [_message(message, at) for at, message in enumerate(fields["messages"])]
    tokens = model.encode_chat(
        messages, add_generation_prompt=add_generation_prompt, variables=template_kwargs or {}
    )
    model.check(tokens, param="messages")
    return tokens


def _read(kind: type[B], fields: dict[str, Any], name: str) -> B:
    for field, value in fields.items():
        if field in _UNSUPPORTED and value is not None and not _UNSUPPORTED[field](value):
            raise _unsupported(field, f"{field} is not supported")
    request = read_body(kind, fields)
    check_model(getattr(request, "model", None), name)
    return request


def _unsupported(field: str, message: str) -> BadRequest:
    return BadRequest(message, param=field, code="unsupported_parameter")


def _parsed(
    request: GenerateRequest,
    model: ServedModel,
    prompts: list[list[int]],
    max_tokens: int | None,
    logprobs: int | None,
    *,
    echo: bool | None = None,
) -> ParsedRequest:
    n = request.n or 1
    if len(prompts) * n > MAX_SEQUENCES:
        raise BadRequest(f"more than {MAX_SEQUENCES} answers at once", param="n")
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options needs stream: true", param="stream_options")
    wanted = {
        name: value
        for name in request.model_fields_set & _SAMPLING
        if (value := getattr(request, name)) is not None
    }
    wanted.setdefault("seed", random.getrandbits(63))
    if request.top_k is not None:
        wanted["top_k"] = max(request.top_k, 0)  # -1 and 0 both say "all" in the field
    if request.logit_bias:
        wanted["logit_bias"] = _logit_bias(request.logit_bias, model)
    if request.stop_token_ids:
        model.check(request.stop_token_ids, param="stop_token_ids")
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    rooms = [model.room(len(tokens), max_tokens, param=param) for tokens in prompts]
    if request.min_tokens is not None and request.min_tokens > min(rooms):
        raise BadRequest("min_tokens is above max_tokens", param="min_tokens")
    wanted["structure"] = read_structure(request)
    try:
        one = Sampling(**wanted, logprobs=logprobs, max_tokens=rooms[0])
    except ValidationError as error:
        raise invalid(error) from None
    return ParsedRequest(
        prompts=prompts,
        samplings=[
            one if room == one.max_tokens else one.model_copy(update={"max_tokens": room})
            for room in rooms
        ],
        n=n,
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        return_token_ids=bool(request.return_token_ids),
        echo=bool(echo),
        priority=request.priority,
        timeout=request.timeout,
    )


def _prompts(prompt: Any, model: ServedModel) -> list[list[int]]:
    """Return the token ids of each prompt. `prompt` is a string, token ids, or a list of either."""
    many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    entries = prompt if many else [prompt]
    if len(entries) > MAX_SEQUENCES:
        raise BadRequest(f"more than {MAX_SEQUENCES} answers at once", param="prompt")
    prompts = []
    for entry in entries:
        if isinstance(entry, str):
            tokens = model.encode(entry)
        elif isinstance(entry, list) and all(type(token) is int for token in entry):
            tokens = entry
        else:
            message = "prompt: a string, a list of token ids, or a list of either"
            raise BadRequest(message, param="prompt")
        model.check(tokens, param="prompt")
        prompts.append(tokens)
    return prompts


def _message(message: dict[str, Any], at: int) -> dict[str, Any]:
    """Return a message with its content as one string, as chat templates expect."""
    role, content = message["role"], message.get("content")
    if isinstance(content, list):
        parts = []
        for part in content:
            text = part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str) or part.get("type", "text") != "text":
                raise BadRequest("only text content is supported", param=f"messages[{at}].content")
            parts.append(text)
        content = "\n".join(parts)
    elif content is None:
        content = ""
    elif not isinstance(content, str):
        raise BadRequest("content: a string or a list of parts", param=f"messages[{at}].content")
    # "developer" is OpenAI's newer name for what templates call "system".
    return {**message, "role": "system" if role == "developer" else role, "content": content}


def _logit_bias(biases: dict[str, float], model: ServedModel) -> dict[int, float]:
    read = {}
    for key, bias in biases.items():
        digits = len(key) <= MAX_DIGITS and key.isascii() and key.isdecimal()
        if not digits or int(key) >= model.info.vocab_size:
            raise BadRequest(f"no token id: {key[:MAX_DIGITS]!r}", param="logit_bias")
        read[int(key)] = bias
    return read

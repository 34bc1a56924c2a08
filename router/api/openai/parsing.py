"""Reading the bodies of `/v1/completions` and `/v1/chat/completions`: from bytes to token ids.

What is asked for and cannot be given is refused, never ignored; fields that nobody knows are.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from engine.protocol import BadRequest, Sampling
from router.api.errors import invalid
from router.api.openai.schemas import ChatRequest, CompletionRequest, GenerateRequest
from router.api.openai.structure import read_structure
from router.base.errors import ModelNotFound
from router.model.served import ServedModel

__all__ = [
    "Ask",
    "check_model",
    "load",
    "read_body",
    "read_chat",
    "read_completion",
    "read_messages",
]

MAX_SEQUENCES = 1024  # prompts × n of one request


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, understood. Choice `i` of prompt `p` has the index `p * n + i`."""

    prompts: list[list[int]]
    samplings: list[Sampling]  # one a prompt: `max_tokens` may depend on its length
    n: int
    stream: bool
    include_usage: bool
    return_token_ids: bool
    echo: bool = False
    priority: int | None = None  # in the queue: lower is earlier
    timeout: float | None = None  # seconds that it may take in all


B = TypeVar("B", bound=BaseModel)

# The fields that mean the same in `Sampling`.
_SAMPLING = frozenset({
    "min_tokens", "temperature", "top_p", "min_p", "seed", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "presence_penalty",
    "frequency_penalty", "repetition_penalty",
})  # fmt: skip

# Asked for, these would change the answer, and are not done here: name → what may be said anyway.
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
    """A JSON object. Raises `BadRequest`."""
    try:
        fields = orjson.loads(body)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadRequest("the body is not a JSON object")
    return fields


def read_body(kind: type[B], fields: dict[str, Any]) -> B:
    """Raises `BadRequest`, naming the first bad field."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise invalid(error) from None


def check_model(asked: str | None, served: str) -> None:
    """Raises `ModelNotFound`. None asks for whatever is served."""
    if asked is not None and asked != served:
        message = f"the model {asked!r} is not served here, but {served!r} is"
        raise ModelNotFound(message, param="model")


def read_completion(body: bytes, model: ServedModel, name: str) -> Ask:
    """`name` is what the model is served as. Takes as long as the prompt is.

    Raises `BadRequest` and `ModelNotFound`.
    """
    fields = load(body)
    asked = _read(CompletionRequest, fields, name)
    n = asked.n or 1
    if asked.best_of is not None and asked.best_of != n:
        raise _unsupported("best_of", "best_of other than n is not supported")
    if asked.echo and asked.logprobs is not None:
        raise _unsupported("echo", "echo is not supported together with logprobs")
    prompts = _prompts(asked.prompt, model)
    return _ask(asked, model, prompts, asked.max_tokens or 16, asked.logprobs, echo=asked.echo)


def read_chat(body: bytes, model: ServedModel, name: str) -> Ask:
    """`name` is what the model is served as. Takes as long as the prompt is.

    Raises `BadRequest` and `ModelNotFound`.
    """
    fields = load(body)
    asked = _read(ChatRequest, fields, name)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    limit, other = asked.max_completion_tokens, asked.max_tokens
    if limit is not None and other is not None and limit != other:
        raise BadRequest(
            "max_tokens is the old name of max_completion_tokens: give one of them",
            param="max_tokens",
            code="invalid_parameter_combination",
        )
    tokens = read_messages(
        fields,
        model,
        add_generation_prompt=asked.add_generation_prompt,
        template_kwargs=asked.chat_template_kwargs,
    )
    return _ask(asked, model, [tokens], limit or other, logprobs)


def read_messages(
    fields: dict[str, Any],
    model: ServedModel,
    *,
    add_generation_prompt: bool,
    template_kwargs: dict[str, Any] | None,
) -> list[int]:
    """The token ids of a conversation that has been validated. Raises `BadRequest`."""
    messages = [_message(message, at) for at, message in enumerate(fields["messages"])]
    tokens = model.encode_chat(
        messages, **{**(template_kwargs or {}), "add_generation_prompt": add_generation_prompt}
    )
    model.check(tokens, param="messages")
    return tokens


def _read(kind: type[B], fields: dict[str, Any], name: str) -> B:
    for field, value in fields.items():
        harmless = _UNSUPPORTED.get(field)
        if harmless is not None and value is not None and not harmless(value):
            raise _unsupported(field, f"{field} is not supported")
    asked = read_body(kind, fields)
    check_model(getattr(asked, "model", None), name)
    return asked


def _unsupported(field: str, message: str) -> BadRequest:
    return BadRequest(message, param=field, code="unsupported_parameter")


def _ask(
    asked: GenerateRequest,
    model: ServedModel,
    prompts: list[list[int]],
    max_tokens: int | None,
    logprobs: int | None,
    *,
    echo: bool | None = None,
) -> Ask:
    n = asked.n or 1
    if len(prompts) * n > MAX_SEQUENCES:
        raise BadRequest(f"more than {MAX_SEQUENCES} answers at once", param="n")
    if asked.stream_options is not None and not asked.stream:
        raise BadRequest("stream_options needs stream: true", param="stream_options")
    wanted = {
        name: value
        for name in asked.model_fields_set & _SAMPLING
        if (value := getattr(asked, name)) is not None
    }
    wanted.setdefault("seed", random.getrandbits(63))
    if asked.top_k is not None:
        wanted["top_k"] = max(asked.top_k, 0)  # -1 and 0 both say "all" in the field
    if asked.logit_bias:
        wanted["logit_bias"] = _logit_bias(asked.logit_bias, model)
    if asked.stop_token_ids:
        model.check(asked.stop_token_ids, param="stop_token_ids")
    param = "messages" if isinstance(asked, ChatRequest) else "prompt"
    rooms = [model.room(len(tokens), max_tokens, param=param) for tokens in prompts]
    if asked.min_tokens is not None and asked.min_tokens > min(rooms):
        raise BadRequest("min_tokens is above max_tokens", param="min_tokens")
    wanted["structure"] = read_structure(asked)
    try:
        one = Sampling(**wanted, logprobs=logprobs, max_tokens=rooms[0])
    except ValidationError as error:
        raise invalid(error) from None
    return Ask(
        prompts=prompts,
        samplings=[
            one if room == one.max_tokens else one.model_copy(update={"max_tokens": room})
            for room in rooms
        ],
        n=n,
        stream=bool(asked.stream),
        include_usage=bool(asked.stream_options and asked.stream_options.include_usage),
        return_token_ids=bool(asked.return_token_ids),
        echo=bool(echo),
        priority=asked.priority,
        timeout=asked.timeout,
    )


def _prompts(prompt: Any, model: ServedModel) -> list[list[int]]:
    """`prompt` as OpenAI allows it: a string, token ids, or a list of either."""
    many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    entries = prompt if many else [prompt]
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
    """A message with its content as one string, which is what chat templates read."""
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
        if not (key.isascii() and key.isdecimal()) or int(key) >= model.info.vocab_size:
            raise BadRequest(f"no token id: {key!r}", param="logit_bias")
        read[int(key)] = bias
    return read

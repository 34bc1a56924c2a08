"""Reading the bodies of `/v1/completions` and `/v1/chat/completions`: from bytes to token ids.

What is asked for and cannot be given is refused, never ignored; fields that nobody knows are.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.protocol import BadRequest, Sampling
from router.errors import ModelNotFound
from router.model import ServedModel
from router.openai.errors import invalid

__all__ = ["Ask", "load", "read_chat", "read_completion"]

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


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None


class _Common(BaseModel):
    """The fields that are not passed on to `Sampling`, which checks the others."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=128)
    return_token_ids: bool | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    logit_bias: dict[str, float] | None = None


class _Completion(_Common):
    prompt: Any = None
    logprobs: int | None = Field(default=None, ge=0, le=20)


class _Chat(_Common):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


C = TypeVar("C", bound=_Common)

_SAMPLING = (
    "min_tokens", "temperature", "top_p", "min_p", "seed", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "presence_penalty",
    "frequency_penalty", "repetition_penalty",
)  # fmt: skip

# Asked for, these would change the answer, and are not done here: name → what may be said anyway.
_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "echo": lambda value: value is False,
    "suffix": lambda value: value == "",
    "tools": lambda value: value == [],
    "tool_choice": lambda value: value in ("none", "auto"),
    "functions": lambda value: value == [],
    "function_call": lambda value: value in ("none", "auto"),
    "response_format": lambda value: value == {"type": "text"},
    "modalities": lambda value: value == ["text"],
    "use_beam_search": lambda value: value is False,
    **dict.fromkeys(
        (
            "audio", "chat_template", "guided_choice", "guided_grammar", "guided_json",
            "guided_regex", "prediction", "prompt_embeds", "prompt_logprobs",
            "structured_outputs", "web_search_options",
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


def read_completion(body: bytes, model: ServedModel) -> Ask:
    """Raises `BadRequest` and `ModelNotFound`. Takes as long as the prompt is."""
    fields = load(body)
    common = _check(_Completion, fields, model)
    prompts = _prompts(common.prompt, model)
    return _ask(common, fields, model, prompts, common.max_tokens or 16, common.logprobs)


def read_chat(body: bytes, model: ServedModel) -> Ask:
    """Raises `BadRequest` and `ModelNotFound`. Takes as long as the prompt is."""
    fields = load(body)
    common = _check(_Chat, fields, model)
    messages = [_message(message, at) for at, message in enumerate(common.messages)]
    tokens = model.encode_chat(
        messages,
        **(common.chat_template_kwargs or {}),
        add_generation_prompt=common.add_generation_prompt,
    )
    model.check(tokens, param="messages")
    if common.top_logprobs is not None and not common.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    logprobs = (common.top_logprobs or 0) if common.logprobs else None
    limit = common.max_completion_tokens or common.max_tokens
    return _ask(common, fields, model, [tokens], limit, logprobs)


def _check(kind: type[C], fields: dict[str, Any], model: ServedModel) -> C:
    for name, harmless in _UNSUPPORTED.items():
        value = fields.get(name)
        if value is not None and not harmless(value):
            raise BadRequest(f"{name} is not supported", param=name, code="unsupported_parameter")
    try:
        common = kind.model_validate(fields)
    except ValidationError as error:
        raise invalid(error) from None
    if common.model is not None and common.model != model.info.name:
        raise ModelNotFound(
            f"the model {common.model!r} is not served here, but {model.info.name!r} is",
            param="model",
        )
    best_of = fields.get("best_of")
    if best_of is not None and best_of != (common.n or 1):
        message = "best_of other than n is not supported"
        raise BadRequest(message, param="best_of", code="unsupported_parameter")
    return common


def _ask(
    common: _Common,
    fields: dict[str, Any],
    model: ServedModel,
    prompts: list[list[int]],
    max_tokens: int | None,
    logprobs: int | None,
) -> Ask:
    n = common.n or 1
    if len(prompts) * n > MAX_SEQUENCES:
        raise BadRequest(f"more than {MAX_SEQUENCES} answers at once", param="n")
    wanted = {name: fields[name] for name in _SAMPLING if fields.get(name) is not None}
    wanted.setdefault("seed", secrets.randbits(63))
    if (top_k := fields.get("top_k")) is not None:
        wanted["top_k"] = 0 if top_k == -1 else top_k  # both say "all" in the field
    if (stop := fields.get("stop")) is not None:
        wanted["stop"] = [stop] if isinstance(stop, str) else stop
    if common.logit_bias:
        wanted["logit_bias"] = _logit_bias(common.logit_bias, model)
    param = "messages" if "messages" in fields else "prompt"
    rooms = [model.room(len(tokens), max_tokens, param=param) for tokens in prompts]
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
        stream=bool(common.stream),
        include_usage=bool(common.stream_options and common.stream_options.include_usage),
        return_token_ids=bool(common.return_token_ids),
    )


def _prompts(prompt: Any, model: ServedModel) -> list[list[int]]:
    """`prompt` as OpenAI allows it: a string, token ids, or a list of either."""
    if prompt is None:
        raise BadRequest("prompt: Field required", param="prompt")
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
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise BadRequest("a message needs a role", param=f"messages[{at}].role")
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
        if not key.isdecimal() or int(key) >= model.info.vocab_size:
            raise BadRequest(f"no token id: {key!r}", param="logit_bias")
        read[int(key)] = bias
    return read

"""How one OpenAI server is spoken to: which fields it knows, and how it names tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from engine.protocol import BadRequest, Sampling, Structure, Unsupported
from router.engines.openai.vocabulary import Vocabulary

__all__ = ["EXTENSIONS", "STRUCTURES", "Dialect", "request_of"]

# Fields beyond OpenAI's, with the same meaning in `Sampling`: what says "as usual" to a server, and
# a value of no legal type.
EXTENSIONS: dict[str, tuple[Any, Any]] = {
    "top_k": (-1, "none"),
    "min_p": (0.0, "none"),
    "min_tokens": (0, "none"),
    "repetition_penalty": (1.0, "none"),
    "stop_token_ids": ([], "none"),
    "ignore_eos": (False, "none"),
    "include_stop_str_in_output": (False, "none"),
    "skip_special_tokens": (True, "none"),
}
# Fields for the form of an output, the most exact first, with the kinds that each can ask for.
STRUCTURES: dict[str, tuple[str, ...]] = {
    "structured_outputs": ("json_schema", "regex", "ebnf", "lark"),  # vLLM
    "response_format": ("json_schema",),  # OpenAI
    "json_schema": ("json_schema",),  # llama.cpp
    "guided_json": ("json_schema",),  # vLLM before 0.12
    "guided_regex": ("regex",),
    "guided_grammar": ("ebnf", "lark"),
    "regex": ("regex",),  # SGLang
    "ebnf": ("ebnf",),
    "grammar": ("ebnf",),  # llama.cpp
}
_IN_STRUCTURED = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "lark": "grammar"}
_USUAL = Sampling()
_SEEDS = 1 << 63  # servers take integers of 64 bits with a sign


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a server accepts.

    `prompts`: token ids, or text only. `ids`: where it tells the tokens of its output, if it does.
    `fields`: those of `EXTENSIONS`, `STRUCTURES` and `FURTHER` that it knows.
    """

    model: str
    prompts: Literal["tokens", "text"] = "tokens"
    ids: Literal["token_ids", "logprobs", "text"] = "text"
    fields: frozenset[str] = frozenset()

    def prompt(self, tokens: list[int], vocabulary: Vocabulary, bos: int | None) -> list[int] | str:
        """Return a prompt in the form that the server takes.

        Servers that take text put BOS before it themselves. Raises `BadRequest` if the tokens are
        no text.
        """
        if self.prompts == "tokens":
            return tokens
        text = vocabulary.text(tokens[1:] if tokens[:1] == [bos] else tokens)
        if "\ufffd" in text:
            raise BadRequest(
                "the prompt ends within a character, and this server takes text only",
                param="prompt",
            )
        return text


def request_of(
    call: Mapping[str, Any], dialect: Dialect, vocabulary: Vocabulary, bos: int | None = None
) -> dict[str, Any]:
    """Return the body of `/v1/completions` for a call of `start_generate`.

    Every field is sent that the server knows, also with its usual value: servers take their own
    defaults from the model's files. Raises `BadRequest` for what the server would ignore, and
    `Unsupported` for what no OpenAI server can do.
    """
    if call.get("lease_id") or call.get("mirror"):
        raise Unsupported("a plain OpenAI server has no leases and no mirrors")
    output = call.get("output") or []
    temperature = call.get("temperature", _USUAL.temperature)
    body: dict[str, Any] = {
        "model": dialect.model,
        "prompt": dialect.prompt([*call["prompt"], *output], vocabulary, bos),
        "max_tokens": call.get("max_tokens", _USUAL.max_tokens) - len(output),
        "temperature": temperature,
        "top_p": call.get("top_p", _USUAL.top_p),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if temperature:
        body["seed"] = _seed(call, len(output))
    for name in ("stop", "presence_penalty", "frequency_penalty"):
        if value := call.get(name):
            body[name] = value
    if bias := call.get("logit_bias"):
        body["logit_bias"] = {str(token): value for token, value in bias.items()}
    logprobs = call.get("logprobs")
    if logprobs is not None or dialect.ids == "logprobs":
        body["logprobs"] = max(logprobs or 0, int(dialect.ids == "logprobs"))
        if "return_tokens_as_token_ids" in dialect.fields:
            body["return_tokens_as_token_ids"] = True
    if dialect.ids == "token_ids":
        body["return_token_ids"] = True
    for name, (usual, _) in EXTENSIONS.items():
        value = _extension(call, name, len(output))
        if name in dialect.fields:
            body[name] = usual if value is None else value
        elif value is not None:
            raise _unknown(name)
    if (structure := call.get("structure")) is not None:
        if output:
            raise Unsupported("a plain OpenAI server cannot continue a structured output")
        body |= _structured(Structure.model_validate(structure), dialect)
    return body


def _extension(call: Mapping[str, Any], name: str, done: int) -> Any:
    """Return the value of a field; None if it is the usual one."""
    value = call.get(name)
    if name == "min_tokens" and value:
        value = max(0, value - done)
    return None if value is None or value == getattr(_USUAL, name) else value


def _structured(wanted: Structure, dialect: Dialect) -> dict[str, Any]:
    known = [
        name for name, kinds in STRUCTURES.items()
        if name in dialect.fields and wanted.kind in kinds
    ]  # fmt: skip
    if not known:
        raise _unknown(wanted.param, f" ({wanted.kind})")
    name, source = known[0], wanted.source
    if not wanted.strict and "response_format" in known:  # the others do not say so
        name = "response_format"
    if name == "structured_outputs":
        return {name: {_IN_STRUCTURED[wanted.kind]: source}}
    if name in ("response_format", "json_schema"):
        try:
            schema = orjson.loads(source)
        except ValueError:
            raise BadRequest(f"{wanted.param}: no JSON schema", param=wanted.param) from None
        if name == "json_schema":
            return {name: schema}
        if not wanted.strict and schema == {"type": "object"}:
            return {name: {"type": "json_object"}}
        named = {"name": "output", "schema": schema, "strict": wanted.strict}
        return {name: {"type": "json_schema", "json_schema": named}}
    return {name: source}


def _unknown(name: str, what: str = "") -> BadRequest:
    return BadRequest(
        f"the OpenAI server behind this router does not know {name}{what}",
        param=name,
        code="unsupported_parameter",
    )


def _seed(call: Mapping[str, Any], done: int) -> int:
    """Return the seed of a choice. Each of them, and each continuation, has one of its own."""
    seed, choice = call.get("seed", 0), call.get("choice", 0)
    if not choice and not done and -_SEEDS <= seed < _SEEDS:
        return int(seed)
    digest = hashlib.sha256(f"{seed} {choice} {done}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1

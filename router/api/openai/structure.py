"""Structured outputs: reads OpenAI's `response_format` and vLLM's extensions as a `Structure`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from engine.protocol import BadRequest, Structure
from router.api.errors import invalid
from router.api.openai.schemas import (
    GenerateRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
    TextFormat,
)

__all__ = ["read_structure"]

B = TypeVar("B", bound=BaseModel)
MOST_KINDS = 64
_FORMATS: dict[str, type[BaseModel]] = {
    "text": TextFormat,
    "json_object": JsonObjectFormat,
    "json_schema": JsonSchemaFormat,
}


def read_structure(request: GenerateRequest) -> Structure | None:
    """Return the structure that `request` asks for, None for plain text.

    Raises `BadRequest` if it asks for several, or for none that exists.
    """
    given = request.model_fields_set
    if given.isdisjoint(_READERS):
        return None
    found = [
        structure
        for name, read in _READERS.items()
        if name in given
        and (value := getattr(request, name)) is not None
        and (structure := read(value, name)) is not None
    ]
    if len(found) > 1:
        names = " and ".join(structure.param for structure in found)
        raise BadRequest(f"give one of {names}", param=found[-1].param)
    return found[0] if found else None


def _response_format(value: Any, name: str) -> Structure | None:
    kind = value.get("type") if isinstance(value, dict) else None
    model = _FORMATS.get(kind) if isinstance(kind, str) else None
    if model is None:
        message = f"{name}: its type is one of {', '.join(_FORMATS)}"
        raise BadRequest(message, param=f"{name}.type" if isinstance(value, dict) else name)
    read = _read(model, value, name)
    if isinstance(read, JsonObjectFormat):
        return _json_object(name)
    if isinstance(read, JsonSchemaFormat):
        schema = read.json_schema
        return _json(schema.schema_, name, strict=schema.strict is not False)
    return None


def _structured_outputs(value: Any, name: str) -> Structure | None:
    if isinstance(value, dict) and len(value) > MOST_KINDS:  # each would be an error of its own
        raise BadRequest(f"{name}: give one kind of structure, not {len(value)}", param=name)
    read = _read(StructuredOutputs, value, name)
    # Not by `model_dump`, which refuses deep values.
    values = {key: getattr(read, key) for key in StructuredOutputs.model_fields}
    given = {key for key, one in values.items() if one is not None and one is not False}
    if read.json_ is False:
        given.add("json_")  # the schema that nothing satisfies
    if len(given) != 1:
        raise BadRequest(f"{name}: give one kind of structure, not {len(given)}", param=name)
    if read.regex is not None:
        return _regex(read.regex, name)
    if read.choice is not None:
        return _choice(read.choice, name)
    if read.grammar is not None:
        return _grammar(read.grammar, name)
    if read.json_ is not None:
        return _json(read.json_, name)
    return _json_object(name)


def _json_object(name: str) -> Structure:
    return _structure(name, kind="json_schema", source='{"type": "object"}', strict=False)


def _json(value: Any, name: str, *, strict: bool = True) -> Structure:
    if not isinstance(value, str | dict | bool):
        raise BadRequest(f"{name}: a JSON schema", param=name)
    try:
        source = value if isinstance(value, str) else orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # over 254 levels
        raise BadRequest(f"{name}: nested too deeply", param=name) from None
    return _structure(name, kind="json_schema", source=source, strict=strict)


def _regex(value: Any, name: str) -> Structure:
    return _structure(name, kind="regex", source=value)


def _grammar(value: Any, name: str) -> Structure:
    kind = "ebnf" if isinstance(value, str) and "::=" in value else "lark"
    return _structure(name, kind=kind, source=value)


def _choice(value: Any, name: str) -> Structure:
    if not (isinstance(value, list) and value and all(type(one) is str and one for one in value)):
        raise BadRequest(f"{name}: a list of strings", param=name)
    # JSON's escapes are among those of GBNF.
    source = "root ::= " + " | ".join(orjson.dumps(one).decode() for one in value)
    return _structure(name, kind="ebnf", source=source)


def _structure(name: str, **fields: Any) -> Structure:
    try:
        return Structure(param=name, **fields)
    except ValidationError as error:
        complaint = invalid(error)
        raise BadRequest(f"{name}: {complaint.message}", param=name) from None


def _read(model: type[B], value: Any, name: str) -> B:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid(error, within=name) from None


_READERS: dict[str, Callable[[Any, str], Structure | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
}

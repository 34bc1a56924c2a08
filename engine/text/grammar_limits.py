"""What a grammar may ask of its compiler. It is checked before, because nothing stops a compiler.

With xgrammar 0.2, memory and time grow with the square of the groups and quantifiers in one rule:
4,000 of them (`.?.?.?…`) take 0.2 GiB, 16,000 take 3 GiB. The states of an object whose number of
properties is bounded grow with the product of that bound and its properties. Counted repetitions
take nothing, however they are nested: `((a{1,1000}){1,1000}){1,1000}` is as small as `a`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from engine.protocol import BadRequest, Structure

__all__ = ["check_limits"]

MAX_NESTING = 100  # brackets; xgrammar's time grows with the square of a schema's depth
MAX_REGEX = 8 << 10  # characters of a regex, or of all patterns of a schema
MAX_PARTS = 1000  # groups and quantifiers of a regex, of all patterns of a schema, or of a rule
MAX_COUNTED = 10_000  # sum over objects with `minProperties` or `maxProperties`: bound · properties


def check_limits(structure: Structure) -> None:
    """Raise `BadRequest` for a grammar that may take too much memory to compile.

    Takes time proportional to the length of the grammar. The compiler reports invalid grammars.
    """
    source = structure.source
    _check(_depth(source), MAX_NESTING, "levels of nesting")
    if structure.kind == "json_schema":
        _check_schema(source)
    elif structure.kind == "regex":
        _check_regex(source)
    elif structure.kind == "ebnf":
        for rule in "".join(_outside_literals(source)).split("::="):
            _check(_parts(rule), MAX_PARTS, "groups and quantifiers in one rule")
    else:
        parts = 0
        for line in source.splitlines():
            continued = line.lstrip().startswith("|")
            parts = _parts(line) + (parts if continued else 0)  # literals too: some are regexes
            _check(parts, MAX_PARTS, "groups and quantifiers in one rule")


def _check(count: int, most: int, what: str) -> None:
    if count > most:
        raise BadRequest(f"the grammar is too large: {count} {what}, at most {most} are compiled")


def _check_regex(source: str) -> None:
    _check(len(source), MAX_REGEX, "characters of a regex")
    _check(_parts(source), MAX_PARTS, "groups and quantifiers")


def _check_schema(source: str) -> None:
    try:
        schema = orjson.loads(source)
    except ValueError:
        return
    patterns: list[str] = []
    counted = 0
    for found in _objects(schema):
        pattern, named = found.get("pattern"), found.get("patternProperties")
        patterns += [pattern] if isinstance(pattern, str) else []
        patterns += named if isinstance(named, dict) else ()
        bounds = [found.get("minProperties"), found.get("maxProperties")]
        bound = max((each for each in bounds if isinstance(each, int | float)), default=0)
        properties = found.get("properties")
        if bound > 0 and isinstance(properties, dict):
            counted += len(properties) * int(min(bound, len(properties)))
    _check_regex("".join(patterns))
    _check(counted, MAX_COUNTED, "counted properties")


def _objects(schema: object) -> Iterator[dict[str, Any]]:
    """Yield all objects of a JSON value."""
    stack = [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            yield value
            stack += value.values()
        elif isinstance(value, list):
            stack += value


def _depth(source: str) -> int:
    depth = deepest = 0
    for char in source:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _parts(source: str) -> int:
    """Return the number of groups and quantifiers; escaped ones count too."""
    return sum(map(source.replace("(?:", "(").count, "(?*+{"))


def _outside_literals(source: str) -> Iterator[str]:
    """Yield the characters of a GBNF that are outside strings, classes and comments."""
    end = ""  # of what the position is in
    escaped = False
    for char in source:
        if escaped:
            escaped = False
        elif char == "\\" and end != "\n":
            escaped = True
        elif end:
            end = "" if char == end else end
        elif char in '"[#':
            end = {'"': '"', "[": "]", "#": "\n"}[char]
        else:
            yield char

"""Grammars that would take gigabytes to compile are refused before; small ones never are."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from engine_helpers import VOCAB, tiny
from tokenizers import Tokenizer

from engine.protocol import BadRequest, Structure
from engine.text.grammar import Grammars
from engine.text.grammar_limits import MAX_COUNTED, MAX_NESTING, MAX_PARTS, MAX_REGEX, check_limits

Kind = Literal["json_schema", "regex", "ebnf", "lark"]


def check(kind: Kind, source: str) -> None:
    check_limits(Structure(kind=kind, source=source))


def objects(properties: int, **bounds: float) -> str:
    named: dict[str, Any] = {f"p{n}": {"type": "null"} for n in range(properties)}
    return json.dumps({"items": [{"properties": named, **bounds}]})


BOMBS: list[tuple[Kind, str]] = [
    ("regex", "a?" * 32_000),
    ("regex", ".?" * 1001),
    ("regex", "(a|b)" * 1001),
    ("regex", "(a|)" * 1001),
    ("regex", "a" * 8193),
    ("json_schema", json.dumps({"pattern": ".?" * 1001})),
    ("json_schema", json.dumps({"allOf": [{"items": {"pattern": ".?" * 30}}] * 40})),
    ("json_schema", json.dumps({"patternProperties": {f"{'.?' * 30}{n}": {} for n in range(40)}})),
    ("json_schema", json.dumps({"prefixItems": [{"pattern": "x" * 99}] * 99})),
    ("json_schema", objects(300, minProperties=100)),
    ("json_schema", objects(300, maxProperties=200.0)),
    ("ebnf", "root ::= " + '"a"? ' * 1001),
    ("ebnf", "root ::= " + '("a"|"b")' * 1001),
    ("ebnf", '# "\nroot ::= ' + '"a"? ' * 1001),  # no string begins in a comment
    ("ebnf", 'root ::= "\\\\" ' + '"a"? ' * 1001),
    ("ebnf", "root ::= [\\]\"] " + "[^a]? " * 1001),
    ("lark", "start: " + "/a?/ " * 1001),
    ("lark", "start: /" + "a?" * 1001 + "/"),
    ("lark", "start: a?\n" + "  | a? a?\n" * 501),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source"), BOMBS, ids=range(len(BOMBS)))
async def test_a_large_grammar_is_not_compiled(kind: Kind, source: str):
    grammars = Grammars(Tokenizer.from_str(tiny().tokenizer_json), VOCAB, tiny().eos_token_ids)
    with pytest.raises(BadRequest, match="too large") as refused:
        await grammars.matcher(Structure(kind=kind, source=source, param="p"), [])
    assert refused.value.param == "p"
    assert grammars._compiler is None and not grammars._cache


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        ("regex", "a" * MAX_REGEX),
        ("regex", "a?" * MAX_PARTS),
        ("regex", "(?:a)" * MAX_PARTS),
        ("json_schema", json.dumps({"pattern": "a" * MAX_REGEX})),
        ("json_schema", objects(MAX_COUNTED // 100, maxProperties=100)),
        ("json_schema", objects(100, minProperties=1e300)),
        ("json_schema", objects(3000)),
        ("json_schema", objects(3000, minProperties=0)),
        ("json_schema", '{"properties": {"a": 1}, "maxProperties": "b", "pattern": 7}'),
        ("json_schema", '{"patternProperties": [], "properties": 5, "minProperties": 5}'),
        ("json_schema", "{"),  # the compiler says what is wrong
        ("json_schema", json.dumps({"enum": ["(a?)*" * 9] * 900})),
        ("ebnf", "root ::= r " + '"a"? ' * (MAX_PARTS // 2) + "\nr ::= " + "[?] " * 2000),
        ("ebnf", "root ::= " + " | ".join(['"why? (how?)"'] * 5000)),
        ("ebnf", "root ::= r\nr ::= " + '"a"? ' * MAX_PARTS + "\ns ::= " + '"a"? ' * MAX_PARTS),
        ("lark", "start: r\n" + "r: a?\n" * 2000),
        ("regex", "(" * MAX_NESTING + ")" * MAX_NESTING),
    ],
)
def test_other_grammars_are_compiled(kind: Kind, least: str):
    check(kind, least)

"""Bodies made to break a parser: each is read, or is refused as the client's mistake."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers

from engine.protocol import BadRequest, MicroserveError, ModelInfo
from router.api.errors import error_json
from router.api.openai.parsing import read_chat, read_completion
from router.api.openai.schemas import ChatRequest, CompletionRequest
from router.model.served import ServedModel

TEMPLATE = (
    "{% for m in messages %}{{ m.content }} {{ (m.extra or 0) | tojson }} {% endfor %}"
    "{{ (wanted or 0) | tojson }}{% if add_generation_prompt %}{% endif %}"
)


def served_model() -> ServedModel:
    """Return a model with the words `w0 w1 …` and the template above."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(100)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    info = ModelInfo(
        name="fake", context_length=256, vocab_size=100, eos_token_ids=[0], bos_token=None,
        eos_token="w0", tokenizer_json=tokenizer.to_str(), chat_template=TEMPLATE,
        fingerprint="f", page_size=16, kv_bytes_per_token=4,
    )  # fmt: skip
    return ServedModel(info)


MODEL = served_model()
CHAT = {"messages": [{"role": "user", "content": "w1"}]}


def nested(depth: int, opening: str = '{"items":', closing: str = "}") -> str:
    return opening * depth + "{}" + closing * depth


DEEP = json.loads(nested(400))
LISTS = json.loads("[" * 400 + "]" * 400)


def read(fields: dict[str, Any] | bytes, path: str = "") -> None:
    """Read a body. Raises what the client receives; checks that this is an error object."""
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    chat = b'"messages"' in body
    try:
        (read_chat if chat else read_completion)(body, MODEL, "fake")
    except MicroserveError as error:
        written = error_json(error)
        assert error.status < 500 and len(written) < 20_000
        assert orjson.loads(written)["error"]["message"]
        raise


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "w1", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"prompt": "w1", "logit_bias": {"²": 1}}, "logit_bias"),
        ({"prompt": "w1", "logit_bias": DEEP}, "logit_bias.items"),
        ({"prompt": ["w1"] * 20_000}, "prompt"),
        ({"prompt": "w1", "stop": ["w1"] * 20_000}, "stop"),
        ({"prompt": "w1", "stop": LISTS}, "stop[0]"),
        ({"prompt": "w1", "model": "x" * 1_000_000}, "model"),
        ({"prompt": "w1", "guided_json": DEEP}, "guided_json"),
        ({"prompt": "w1", "structured_outputs": {"json": DEEP}}, "structured_outputs"),
        (
            {"prompt": "w1", "response_format": {
                "type": "json_schema", "json_schema": {"name": "x", "schema": DEEP}}},
            "response_format",
        ),
        ({**CHAT, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({**CHAT, "chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
        ({**CHAT, "chat_template_kwargs": {"raise_exception": 1}}, "chat_template_kwargs"),
        ({**CHAT, "chat_template_kwargs": {"wanted": DEEP, "x": LISTS}}, None),
        ({"messages": [{"role": "user", "content": "w1", "extra": LISTS}]}, None),
        ({"messages": CHAT["messages"] * 20_000}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "messages[0].content"),
    ],
)  # fmt: skip
def test_each_is_refused_and_named(fields: dict[str, Any], param: str | None):
    if param is None:  # accepted, unless the template's JSON nests too deeply for Python
        try:
            read(fields)
        except BadRequest as refused:
            assert refused.param == "messages"
        return
    with pytest.raises(MicroserveError) as error:
        read(fields)
    assert error.value.param == param


@pytest.mark.parametrize("name", ["self", "add_generation_prompt", "x y", "", "cls"])
def test_any_other_name_may_be_a_variable_of_the_template(name: str):
    read({**CHAT, "chat_template_kwargs": {name: True}})


def test_a_template_that_recurses_too_deeply_is_refused():
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(BadRequest, match="nested too deeply"):
        MODEL.encode_chat(CHAT["messages"], variables={"wanted": deep})


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "w1", "n": %b}' % (b"1" * 5000),
        b'{"prompt": "w1", "temperature": 1e999}',
        b'{"prompt": "w1", "temperature": -1e999}',
        b'{"prompt": "w1", "temperature": NaN}',
        b'{"prompt": "w1", "timeout": Infinity}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "w1", "user": "\\udfff"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "w1", "x": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
        b'{"prompt": "\xff"}',
        b"\x00",
        b"",
    ],
)
def test_each_is_no_json(body: bytes):
    with pytest.raises(BadRequest):
        read(body)


def test_the_last_of_duplicate_keys_counts_and_minus_zero_is_zero():
    read(b'{"prompt": 3, "prompt": "w1", "temperature": -0.0, "logit_bias": {"1": -0.0, "1": 5}}')


ODD = st.sampled_from([
    -(2**63), 2**63, 2**64 - 1, 2**64, 10**300, -1, -0.0, 5e-324, 1e308, "", "\0", "ü\ufffe",
    "9" * 5000, "w1 " * 50, True, False, None, [], {}, [[]], DEEP, LISTS, ["w1"] * 2000,
    [1] * 2000, {str(number): 1 for number in range(2000)}, [{"type": "text", "text": "w1"}],
])  # fmt: skip
VALUES = st.recursive(
    ODD | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)  # fmt: skip
NAMES = st.sampled_from([
    *sorted({
        *CompletionRequest.model_json_schema()["properties"],
        *ChatRequest.model_json_schema()["properties"],
    } - {"prompt", "messages"}),
    "tools", "tool_choice", "functions", "suffix", "unknown",
])  # fmt: skip
INNER = st.sampled_from(
    ["type", "json_schema", "schema", "json", "regex", "choice", "grammar", "role", "content"]
)
FIELDS = st.dictionaries(NAMES, VALUES | st.dictionaries(INNER, VALUES, max_size=3), max_size=4)
PROMPTS = st.one_of(
    st.fixed_dictionaries({"prompt": VALUES | st.just("w1")}),
    st.fixed_dictionaries({"messages": VALUES | st.just(CHAT["messages"])}),
    st.fixed_dictionaries(
        {"messages": st.lists(st.dictionaries(INNER, VALUES, max_size=3), max_size=2)}
    ),
)


@pytest.mark.slow
@given(PROMPTS, FIELDS)
@settings(max_examples=60)
def test_no_body_is_a_failure_of_the_router(prompt: dict[str, Any], fields: dict[str, Any]):
    with suppress(MicroserveError):
        read({**fields, **prompt})


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "w1", "stop": [0] * 50},
        {"prompt": "w1", "stop_token_ids": ["x"] * 50},
        {"prompt": "w1", "logit_bias": {str(number): "x" for number in range(50)}},
        {"messages": [0] * 50},
        {"messages": [{"role": 0}] * 50},
    ],
)
def test_many_mistakes_cost_no_more_than_one(fields: dict[str, Any]):
    """An error takes more memory than the element that it is about."""
    kind = ChatRequest if "messages" in fields else CompletionRequest
    with pytest.raises(ValidationError) as wrong:
        kind.model_validate(fields)
    assert wrong.value.error_count() == 1


def test_the_kinds_of_structure_are_counted_before_they_are_read():
    with pytest.raises(BadRequest, match="not 1000"):
        read({"prompt": "w1", "structured_outputs": {str(number): 1 for number in range(1000)}})

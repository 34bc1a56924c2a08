"""Structured outputs: grammars and their masks, alone and in an engine."""

from __future__ import annotations

import asyncio
import builtins
import json
import re
import threading
from collections.abc import AsyncIterator

import pytest
from engine_helpers import VOCAB, collect, generate, running, start, tiny
from tokenizers import Tokenizer

from engine.protocol import BadRequest, NoCapacity, Structure
from engine.service.engine import MicroserveEngine
from engine.text import grammar as grammar_module
from engine.text.grammar import Grammars

PROMPT = [(11 * n) % 250 for n in range(40)]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "size": {"enum": ["small", "large"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "size", "count"],
        "additionalProperties": False,
    }
)
EMAIL = r"[a-z]{1,8}@[a-z]{1,8}\.(com|org)"
LIST = 'root ::= "<" item ("," item){2} ">"\nitem ::= "red" | "green" | "blüe"'


def structure(kind: str, source: str) -> dict[str, str]:
    return {"kind": kind, "source": source, "param": "p"}


@pytest.fixture
async def engine() -> AsyncIterator[MicroserveEngine]:
    async with running(max_live=64) as engine:
        yield engine


async def written(engine: MicroserveEngine, wanted: dict[str, str], **fields: object) -> str:
    """Return the text of an output that must follow `wanted` and ends by itself."""
    options = {"max_tokens": 300, "temperature": 1.0, "structure": wanted, **fields}
    events = await collect(await engine.start_generate(start(PROMPT, **options)))
    assert events[-1].finish_reason == "stop"
    return "".join(event.text for event in events)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("greedy", [False, True])
async def test_outputs_follow_their_grammar(engine: MicroserveEngine, seed: int, greedy: bool):
    """The model is random, so only the masks can make its output valid."""
    drawn = {"temperature": 0.0 if greedy else 1.0, "seed": seed}
    text = await written(engine, structure("json_schema", SCHEMA), **drawn)
    value = json.loads(text)
    assert list(value) == ["name", "size", "count"]
    assert len(value["name"]) <= 6 and value["size"] in ("small", "large")
    assert 0 <= value["count"] <= 99
    assert re.fullmatch(EMAIL, await written(engine, structure("regex", EMAIL), **drawn))
    text = await written(engine, structure("ebnf", LIST), **drawn)
    assert set(text[1:-1].split(",")) <= {"red", "green", "blüe"}


async def test_the_options_of_sampling_hold_within_a_grammar(engine: MicroserveEngine):
    digits = structure("regex", "[0-9]{20}")
    ids = {digit: Tokenizer.from_str(tiny().tokenizer_json).token_to_id(digit) for digit in "37x"}
    bias = {ids["3"]: 100.0, ids["x"]: 100.0}
    assert await written(engine, digits, logit_bias=bias) == "3" * 20
    assert await written(engine, digits, logit_bias={ids["7"]: 100.0}, top_k=1) == "7" * 20
    text = await written(engine, digits, top_k=3, top_p=0.5, min_p=0.1, frequency_penalty=1.0)
    assert re.fullmatch("[0-9]{20}", text)
    threes = {"logit_bias": {ids["3"]: 100.0}}
    assert await written(engine, digits, stop=["4", "333"], **threes) == ""
    text = await written(engine, digits, stop_token_ids=[ids["3"]], **threes)
    assert text == "3"


async def test_the_end_of_a_grammar_is_an_end(engine: MicroserveEngine):
    """No other parameter of a request lets its output continue."""
    three = structure("regex", "abc")
    for fields in ({}, {"ignore_eos": True}, {"min_tokens": 50}, {"ignore_eos": False}):
        assert await written(engine, three, **fields) == "abc"
    events = await collect(
        await engine.start_generate(start(PROMPT, max_tokens=2, structure=three))
    )
    assert events[-1].finish_reason == "length"


async def test_min_tokens_holds_where_the_grammar_allows_it(engine: MicroserveEngine):
    text = await written(engine, structure("regex", "[a-z]+"), min_tokens=40, ignore_eos=False)
    assert len(text) >= 40


@pytest.mark.parametrize("cut", [1, 9, 20])
@pytest.mark.slow
async def test_a_structured_output_resumes_with_its_output(engine: MicroserveEngine, cut: int):
    options = {
        "structure": structure("json_schema", SCHEMA), "max_tokens": 300, "temperature": 1.0,
        "seed": 4,
    }  # fmt: skip
    whole = await generate(engine, PROMPT, **options)
    assert len(whole) > 20
    async with running() as other:
        rest = await generate(other, PROMPT, output=whole[:cut], **options)
    assert whole[:cut] + rest == whole


async def test_preempted_outputs_follow_their_grammar():
    async with running(pages=12) as small:
        texts = await asyncio.gather(
            *(
                written(
                    small,
                    structure("regex", "[a-z]{60}"),
                    request_id=f"r{n}",
                    seed=n,
                    max_tokens=70,
                )
                for n in range(4)
            )
        )
        assert small.preemptions > 0
    assert all(re.fullmatch("[a-z]{60}", text) for text in texts)
    assert len(set(texts)) == 4


BAD = [
    ("json_schema", "{"),
    ("json_schema", '"text"'),
    ("json_schema", '{"type": "nonsense"}'),
    ("json_schema", '{"$ref": "#/nowhere"}'),
    ("json_schema", "false"),
    ("json_schema", '{"enum": []}'),
    ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}'),
    ("json_schema", '{"items":' * 200 + "{}" + "}" * 200),
    ("regex", "(a"),
    ("regex", "a\0b"),
    ("regex", "(" * 5000 + "a" + ")" * 5000),
    ("ebnf", 'start ::= "a"'),
    ("ebnf", "root ::= unknown"),
    ("ebnf", 'root ::= root "x"'),  # nothing can begin
]


@pytest.mark.parametrize(("kind", "source"), BAD)
async def test_bad_grammars_are_refused_and_affect_no_other_request(
    engine: MicroserveEngine, kind: str, source: str
):
    for _ in range(2):
        with pytest.raises(BadRequest) as refused:
            await engine.start_generate(start(PROMPT, structure=structure(kind, source)))
        assert refused.value.param == "p"
        assert "/" not in refused.value.message.partition("#")[0], "a source file's path"
    assert engine.waiting == 0
    assert len(await generate(engine, PROMPT)) == 8


async def test_output_that_does_not_follow_is_refused(engine: MicroserveEngine):
    for output in ([300], [*b"abc"]):  # token ids are not bytes
        with pytest.raises(BadRequest) as refused:
            call = start(PROMPT, structure=structure("regex", "abc"), output=output)
            await engine.start_generate(call)
        assert refused.value.param == "output"


async def test_a_grammar_that_is_slow_to_match_is_refused(
    engine: MicroserveEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(grammar_module, "SLOW_S", 0.0)
    with pytest.raises(BadRequest, match="too long"):
        await engine.start_generate(start(PROMPT, structure=structure("regex", "a")))


async def test_a_grammar_that_becomes_slow_fails_only_its_request(
    engine: MicroserveEngine, monkeypatch: pytest.MonkeyPatch
):
    digits = structure("regex", "[0-9]{50}")
    await written(engine, digits)  # the grammar is compiled and tested
    monkeypatch.setattr(grammar_module, "SLOW_S", 0.0)
    stream = await engine.start_generate(start(PROMPT, "slow", structure=digits, max_tokens=60))
    other = asyncio.create_task(generate(engine, PROMPT, "other"))
    with pytest.raises(BadRequest, match="grammar"):  # a client error, not an engine failure
        await collect(stream)
    assert len(await other) == 8
    assert engine.loop.stats.failed_steps == 0


async def test_a_grammar_is_compiled_once_and_off_the_event_loop(
    engine: MicroserveEngine, monkeypatch: pytest.MonkeyPatch
):
    threads: list[threading.Thread] = []
    compile_ = Grammars._compile

    def noted(self: Grammars, compiler: object, wanted: Structure) -> object:
        threads.append(threading.current_thread())
        return compile_(self, compiler, wanted)  # type: ignore[arg-type]

    monkeypatch.setattr(Grammars, "_compile", noted)
    fresh = structure("regex", "x{3}")
    await asyncio.gather(*(written(engine, fresh, request_id=f"r{n}") for n in range(4)))
    assert len(threads) == 1
    assert threads[0].name.startswith("grammar")


async def test_a_grammar_that_takes_too_long_is_refused(
    engine: MicroserveEngine, monkeypatch: pytest.MonkeyPatch
):
    """Its thread is left behind: others are compiled meanwhile, unless there are too many."""
    begun, go = threading.Event(), threading.Event()
    compile_, grammars = Grammars._compile, engine.generations._grammars

    def slow(self: Grammars, compiler: object, wanted: Structure) -> object:
        if wanted.source.startswith("slow"):
            begun.set()
            go.wait(30)
        return compile_(self, compiler, wanted)  # type: ignore[arg-type]

    monkeypatch.setattr(Grammars, "_compile", slow)

    async def refused(source: str) -> None:
        with pytest.raises(BadRequest, match="to compile"):
            await engine.start_generate(start(PROMPT, structure=structure("regex", source)))

    try:
        monkeypatch.setattr(grammar_module, "COMPILE_S", 0.05)
        first = asyncio.create_task(refused("slow"))
        await asyncio.to_thread(begun.wait, 30)
        monkeypatch.setattr(grammar_module, "COMPILE_S", 30.0)
        assert await written(engine, structure("regex", "b"), request_id="behind") == "b"
        await first
        (late,) = grammars._late
        assert late.daemon  # the process can end while it works
        await refused("slow")
        assert grammars._late == {late}  # it was not tried again
        monkeypatch.setattr(grammar_module, "COMPILE_S", 0.05)
        await refused("slow too")
        with pytest.raises(NoCapacity):
            await written(engine, structure("regex", "c"))
    finally:
        go.set()
    async with asyncio.timeout(10):
        while any(thread.is_alive() for thread in grammars._late):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    monkeypatch.setattr(grammar_module, "COMPILE_S", 30.0)
    assert await written(engine, structure("regex", "c")) == "c"
    assert engine.waiting == 0


async def test_without_xgrammar_the_refusal_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def absent(name: str, *args: object, **kwargs: object) -> object:
        if name == "xgrammar":
            raise ImportError("No module named 'xgrammar'")
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", absent)
    async with running() as bare:
        with pytest.raises(BadRequest, match=r"\.\[structured\]") as refused:
            await bare.start_generate(start(PROMPT, structure=structure("regex", "a")))
        assert (refused.value.param, refused.value.code) == ("p", "unsupported_parameter")


async def test_the_cache_of_grammars_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_module, "MAX_CACHED", 2)
    tokenizer = Tokenizer.from_str(tiny().tokenizer_json)
    grammars = Grammars(tokenizer, VOCAB, tiny().eos_token_ids)
    for source in "abca":
        matcher = await grammars.matcher(Structure(kind="regex", source=source), [])
        assert matcher.allowed().sum() == 1
    assert len(grammars._cache) == 2


async def test_repetitions_take_nothing_however_they_are_nested():
    """So they need no limit; those of `grammar_limits` are for what does take memory."""
    grammars = Grammars(Tokenizer.from_str(tiny().tokenizer_json), VOCAB, tiny().eos_token_ids)
    for kind, source in (
        ("regex", "((a{1,1000}){1,1000}){1,1000}"),
        ("json_schema", '{"type": "string", "maxLength": 1000000000}'),
        ("json_schema", '{"type": "array", "items": {"type": "null"}, "minItems": 1000000000}'),
    ):
        wanted = Structure.model_validate(structure(kind, source))
        assert (await grammars.matcher(wanted, [])).allowed().any()
    assert all(task.result().memory_size_bytes < 1 << 20 for task in grammars._cache.values())

"""The calls to an OpenAI server: what it is asked, what it may answer, and what is refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from raw_server import HEAD, RawServer
from scripted_openai import FILES, IDS, TOKENIZER, ScriptedOpenAI, connected, said
from waiting import until

from engine.protocol import BadRequest, Internal, NoCapacity, Unauthorized, Unsupported
from router.base import BadReply, Chunk, Conflict, EngineUnreachable, NobodyListens
from router.engines.http_client import HttpClient
from router.engines.openai import Descriptions, OpenAIEngine, ServerAddress
from router.engines.openai.engine import SPARE

PROMPT = [5, 6, 7, 8, 9, 10]
CALL = {"request_id": "r", "prompt": PROMPT, "max_tokens": 30, "temperature": 0.0}


async def generated(engine: OpenAIEngine, **call: Any) -> Chunk:
    """Return the whole answer as one chunk."""
    stream = await engine.start_generate({**CALL, **call}, {})
    whole = await stream.next()
    while whole.finish_reason is None:
        whole.extend(await stream.next())
    await stream.finish()
    return whole


@pytest.mark.parametrize("ids", ["token_ids", "logprobs", "none"])
@pytest.mark.parametrize("lag", [0, 4])
async def test_tokens_and_text_however_the_server_tells_them(ids, lag):
    async with ScriptedOpenAI(ids=ids, lag=lag).serving() as server, connected(server) as engine:
        chunk = await generated(engine)
    tokens = said(6, 30)
    assert (chunk.token_ids, chunk.text) == (tokens, TOKENIZER.decode(tokens))
    assert (chunk.finish_reason, chunk.logprobs) == ("length", None)
    assert chunk.usage is not None and chunk.usage.completion_tokens == 30


@pytest.mark.parametrize("ids", ["token_ids", "none"])
async def test_every_chunk_can_be_continued_after(ids):
    """Text and tokens agree after each chunk, also within characters."""
    async with (
        ScriptedOpenAI(ids=ids, lag=2).serving() as server,
        connected(server) as engine,
    ):
        for cut in range(1, 25):
            output: list[int] = []
            server.cut_after, text = [cut], ""
            stream = await engine.start_generate({**CALL, "max_tokens": 40}, {})
            with pytest.raises(EngineUnreachable, match="closed"):
                while True:
                    chunk = await stream.next()
                    output, text = output + chunk.token_ids, text + chunk.text
            assert text == TOKENIZER.decode(output) and len(output) <= cut
            rest = await generated(engine, output=output, max_tokens=40)
            assert output + rest.token_ids == said(6, 40)
            assert text + rest.text == TOKENIZER.decode(said(6, 40))
            assert rest.usage is not None and rest.usage.completion_tokens == 40
            assert rest.usage.prompt_tokens == 6


async def test_a_prompt_as_text_where_the_server_takes_no_tokens():
    prompt = TOKENIZER.encode("Say th").ids
    async with (
        ScriptedOpenAI(ids="none", takes_tokens=False).serving() as server,
        connected(server) as engine,
    ):
        chunk = await generated(engine, prompt=prompt)
        assert server.streams[-1]["prompt"] == "Say th"
        assert chunk.text == TOKENIZER.decode(said(len(prompt), 30))
        within = TOKENIZER.encode("ü").ids[:1]
        with pytest.raises(BadRequest, match="within a character"):
            await engine.start_generate({**CALL, "prompt": within}, {})


async def test_all_that_the_server_knows_is_sent_and_the_rest_refused():
    async with ScriptedOpenAI().serving() as server, connected(server) as engine:
        await generated(engine)
        body = server.streams[-1]
        assert body | {"stream_options": 0} == {
            "model": "m", "prompt": PROMPT, "max_tokens": 30, "temperature": 0.0, "top_p": 1.0,
            "stream": True, "stream_options": 0, "return_token_ids": True,
            "top_k": -1, "min_p": 0.0, "ignore_eos": False,
        }  # fmt: skip
        await generated(
            engine, temperature=0.5, top_k=4, min_p=0.5, ignore_eos=True, seed=9, stop=["never"],
            presence_penalty=1.0, frequency_penalty=-1.0, logit_bias={3: 1.5},
        )  # fmt: skip
        body = server.streams[-1]
        assert (body["top_k"], body["min_p"], body["ignore_eos"], body["seed"]) == (4, 0.5, True, 9)
        assert (body["stop"], body["logit_bias"]) == (["never"], {"3": 1.5})
        assert (body["presence_penalty"], body["frequency_penalty"]) == (1.0, -1.0)
        for name, value in (
            ("min_tokens", 3), ("repetition_penalty", 1.5), ("stop_token_ids", [4]),
            ("include_stop_str_in_output", True), ("skip_special_tokens", False),
        ):  # fmt: skip
            with pytest.raises(BadRequest) as refused:
                await engine.start_generate({**CALL, name: value}, {})
            assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")
        with pytest.raises(BadRequest, match="response_format"):
            structure = {"kind": "regex", "source": "a"}
            await engine.start_generate({**CALL, "structure": structure}, {})


async def test_a_server_that_refuses_unknown_fields():
    server = ScriptedOpenAI(strict=True, ids="none", knows=frozenset({"top_k"}))
    async with server.serving(), connected(server) as engine:
        chunk = await generated(engine, top_k=2)
        assert chunk.text == TOKENIZER.decode(said(6, 30))
        assert server.streams[-1]["top_k"] == 2
        with pytest.raises(BadRequest, match="min_p"):
            await engine.start_generate({**CALL, "min_p": 0.5}, {})


async def test_each_choice_and_each_continuation_has_a_seed_of_its_own():
    async with ScriptedOpenAI().serving() as server, connected(server) as engine:
        for more in ({}, {"choice": 1}, {"output": said(6, 4)}, {"seed": 2**64 - 1}):
            await generated(engine, **{"temperature": 1.0, "seed": 5, **more})
    seeds = [body["seed"] for body in server.streams]
    assert seeds[0] == 5 and len(set(seeds)) == 4 and max(seeds) < 2**63


@pytest.mark.parametrize("kind", ["json_schema", "regex", "ebnf", "lark"])
@pytest.mark.parametrize("strict", [True, False])
async def test_structured_output(kind, strict):
    known = frozenset({"structured_outputs", "response_format", "return_token_ids"})
    structure = {"kind": kind, "source": '{"type": "object"}', "strict": strict}
    async with ScriptedOpenAI(knows=known).serving() as server, connected(server) as engine:
        await generated(engine, structure=structure)
        body = server.streams[-1]
        if strict:
            name = {"json_schema": "json", "regex": "regex"}.get(kind, "grammar")
            assert body["structured_outputs"] == {name: structure["source"]}
        elif kind == "json_schema":
            assert body["response_format"] == {"type": "json_object"}
        with pytest.raises(Unsupported, match="continue"):
            await engine.start_generate({**CALL, "structure": structure, "output": [5]}, {})


async def test_a_server_that_closes_connections_after_a_refusal():
    async with ScriptedOpenAI(closes=True).serving() as server, connected(server) as engine:
        assert (await generated(engine, top_k=3)).token_ids == said(6, 30)


async def test_llama_cpp_is_known_by_its_name():
    """It takes its default for a value of a wrong type."""
    models = [{"id": "m", "owned_by": "llamacpp"}]
    server = ScriptedOpenAI(ids="logprobs", knows=frozenset(), models=models)
    async with server.serving(), connected(server) as engine:
        schema = {"kind": "json_schema", "source": '{"type": "array"}'}
        chunk = await generated(engine, structure=schema, top_k=3)
        assert chunk.token_ids == said(6, 30)
        body = server.streams[-1]
        assert (body["json_schema"], body["top_k"], body["logprobs"]) == ({"type": "array"}, 3, 1)
        assert len(server.requests) <= 4


async def test_a_stop_string_ends_the_answer():
    async with ScriptedOpenAI(lag=3).serving() as server, connected(server) as engine:
        chunk = await generated(engine, stop=["aus"])
    assert chunk.text == TOKENIZER.decode(said(6, 30)).partition("aus")[0]
    assert (chunk.finish_reason, chunk.stop_reason) == ("stop", "aus")


@pytest.mark.parametrize("ids", ["token_ids", "logprobs"])
async def test_log_probabilities(ids):
    knows = frozenset({"return_token_ids", "return_tokens_as_token_ids"})
    server = ScriptedOpenAI(ids=ids, knows=knows)
    async with server.serving(), connected(server) as engine:
        chunk = await generated(engine, logprobs=1, max_tokens=5)
    assert chunk.logprobs is not None
    assert [one["token_id"] for one in chunk.logprobs] == chunk.token_ids == said(6, 5)
    # A part of a character is known by its bytes.
    assert bytes(byte for one in chunk.logprobs for byte in one["bytes"]).decode() == chunk.text
    assert {one["logprob"] for one in chunk.logprobs} == {-0.5}
    assert [len(one["top"]) for one in chunk.logprobs] == [1] * 5


async def test_usage_with_what_was_cached():
    server = ScriptedOpenAI(details={"prompt_tokens_details": {"cached_tokens": 2}})
    async with server.serving(), connected(server) as engine:
        chunk = await generated(engine)
    assert chunk.usage is not None and chunk.usage.cached_tokens == 2


async def test_an_answer_whose_stream_ends_without_usage():
    async with ScriptedOpenAI(tail=False).serving() as server, connected(server) as engine:
        chunk = await generated(engine)
    assert (chunk.token_ids, chunk.usage) == (said(6, 30), None)


async def test_an_aborted_stream_closes_its_connection():
    server = ScriptedOpenAI(gate=asyncio.Event())
    async with server.serving(), connected(server) as engine:
        stream = await engine.start_generate(CALL, {"X-Request-Id": "me"})
        assert server.headers[-1]["x-request-id"] == "me"
        await stream.next()
        assert (await engine.state()).running == 1
        assert (await engine.state()).running == 0  # it has been silent since
        stream.abort("enough")
        with pytest.raises(EngineUnreachable, match="enough"):
            await stream.next()
        await until(lambda: server.left == 1)
        assert (await engine.state()).running == 0
        await engine.release({"request_id": "r"}, {})


async def test_a_call_that_is_cancelled_before_the_answer():
    async with RawServer(b"").serving() as silent:
        url = silent.url.replace("http", "openai+http")
        async with ScriptedOpenAI().serving() as server, connected(server) as engine:
            engine._http = HttpClient(silent.url)
            call = asyncio.create_task(engine.start_generate(CALL, {}))
            await until(lambda: silent.heads)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await until(lambda: engine._running == 0)
    assert url.startswith("openai+")


async def test_streams_are_bounded():
    server = ScriptedOpenAI(gate=asyncio.Event())
    async with server.serving(), connected(f"{server.url}?max_streams=2") as engine:
        streams = [await engine.start_generate(CALL, {}) for _ in range(2)]
        with pytest.raises(NoCapacity):
            await engine.start_generate(CALL, {})
        streams[0].abort()
        await until(lambda: engine._running == 1)
        streams.append(await engine.start_generate(CALL, {}))
        for stream in streams:
            stream.abort()


@pytest.mark.parametrize(
    ("status", "headers", "kind"),
    [
        (429, {"Retry-After": "3"}, NoCapacity), (503, {}, NoCapacity), (400, {}, BadRequest),
        (500, {}, Internal), (401, {}, Unauthorized), (502, {}, EngineUnreachable),
    ],
)  # fmt: skip
async def test_refusals(status, headers, kind):
    async with ScriptedOpenAI().serving() as server, connected(server) as engine:
        server.refuse = [(status, {"error": {"message": "no", "param": "top_p"}}, headers)]
        with pytest.raises(kind, match="no") as refused:
            await engine.start_generate(CALL, {})
        assert refused.value.param == "top_p" or kind is NoCapacity
        if headers:
            assert refused.value.retry_after_s == 3
        assert (await generated(engine)).token_ids == said(6, 30)


MANY = dict.fromkeys(map(str, range(99)))
GOOD = 'data: {"choices": [{"index": 0, "text": "a", "token_ids": [67]}]}\n\n'
assert TOKENIZER.encode("a").ids != IDS[:1]


def event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


@pytest.mark.parametrize(
    ("lines", "kind", "message"),
    [
        ("data: {no json\n\n", EngineUnreachable, "invalid event"),
        ('data: {"choices": 5}\n\n', EngineUnreachable, "invalid event"),
        ("data: " + "[" * 100_000 + "\n\n", EngineUnreachable, "invalid event"),
        (event(choices=[{"text": "a", "token_ids": [-1]}]), EngineUnreachable, "invalid event"),
        (event(choices=[{"text": "a", "token_ids": [10**6]}]), EngineUnreachable, "vocabulary"),
        (event(choices=[{"text": "a", "token_ids": [9] * 31}]), EngineUnreachable, "max_tokens"),
        (event(choices=[{"text": "a" * (1 << 21), "token_ids": []}]), EngineUnreachable, "text"),
        (event(choices=[{"index": 1, "text": "a"}]), EngineUnreachable, "nobody asked"),
        (event(choices=[{"text": "", "finish_reason": "abort"}]), EngineUnreachable, "abort"),
        (event(choices=[{"text": ""}]) * 1100, EngineUnreachable, "more events"),
        ("\n" * (2 << 20), EngineUnreachable, "without an event"),
        (": ping\n\n" * (1 << 18), EngineUnreachable, "without an event"),
        ("data: " + "x" * (17 << 20), EngineUnreachable, "line of more than"),
        (event(error={"message": "boom", "code": 500}), Internal, "boom"),
        (event(object="error", message="boom", code=400), BadRequest, "boom"),
        ('error: {"message": "old llama"}\n\n', Internal, "old llama"),
        (event(error={"message": "full", "code": 429}), NoCapacity, "full"),
        ('{"error": {"message": "boom", "code": 400}}\n', BadRequest, "boom"),
        (event(choices=[{"text": "", "stop_reason": 2**70}]), EngineUnreachable, "invalid event"),
        ('{"choices": [{"text": "whole"}]}', EngineUnreachable, "closed"),
        ("data: [DONE]\n\n", EngineUnreachable, "closed"),
        ("", EngineUnreachable, "closed"),
    ],
)
@pytest.mark.parametrize("first", ["", GOOD])
async def test_what_a_server_may_not_send(lines, kind, message, first):
    async with ScriptedOpenAI().serving() as server, connected(server) as engine:
        server.events_instead = [first + lines]
        with pytest.raises(kind, match=message):
            stream = await engine.start_generate(CALL, {})
            while True:
                chunk = await stream.next()
                assert (chunk.token_ids, chunk.text) == (TOKENIZER.encode("a").ids, "a")
        await until(lambda: engine._running == 0)


@pytest.mark.parametrize(
    "logprobs",
    [
        {"tokens": ["a"], "token_logprobs": []}, {"tokens": 5}, {"tokens": ["a"] * 2},
        {"tokens": [7], "token_logprobs": [-1.0]}, {"content": [{}]}, {"content": [5]},
        {"tokens": ["token_id:999999"], "token_logprobs": [-1.0]},
        {"tokens": ["token_id:x"], "token_logprobs": [-1.0]},
        {"tokens": ["bytes:\\xzz"], "token_logprobs": [-1.0]},
        {"tokens": ["a"], "token_logprobs": ["x"]},
        {"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [5]},
        {"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [MANY]},
    ],
)  # fmt: skip
async def test_invalid_log_probabilities(logprobs):
    async with ScriptedOpenAI().serving() as server, connected(server) as engine:
        server.events_instead = [event(choices=[{"text": "a", "logprobs": logprobs}])]
        with pytest.raises(EngineUnreachable, match="invalid logprobs"):
            stream = await engine.start_generate({**CALL, "logprobs": 1}, {})
            await stream.next()


@pytest.mark.parametrize(
    "logprobs",
    [
        {"tokens": ["a"] * 31, "token_logprobs": [-1.0] * 31},
        {"content": [{"token": "a", "logprob": -1.0}] * 31},
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
async def test_log_probabilities_of_more_tokens_than_were_asked_for(logprobs, at_once):
    if not at_once:
        logprobs = {name: values[:16] for name, values in logprobs.items()}
    async with ScriptedOpenAI(ids="none").serving() as server, connected(server) as engine:
        server.events_instead = [event(choices=[{"text": "", "logprobs": logprobs}]) * 2]
        with pytest.raises(EngineUnreachable, match="more than max_tokens"):
            stream = await engine.start_generate({**CALL, "logprobs": 1}, {})
            await stream.next()


async def test_log_probabilities_of_another_number_of_tokens():
    logprobs = {"tokens": ["a"] * 2, "token_logprobs": [-1.0] * 2}
    async with ScriptedOpenAI().serving() as server, connected(server) as engine:
        server.events_instead = [
            event(choices=[{"text": "a", "token_ids": [67], "logprobs": logprobs}])
        ]
        with pytest.raises(EngineUnreachable, match="log probabilities of 2 tokens with 1"):
            stream = await engine.start_generate({**CALL, "logprobs": 1}, {})
            await stream.next()


@pytest.mark.parametrize("parts", [["a" * 99], ["a" * 9, "a" * 90], ["a"] * 99])
@pytest.mark.parametrize("goes_on", [False, True])
async def test_text_without_tokens_is_cut_behind_max_tokens(parts, goes_on):
    """A server that generates more than it was asked for, and tells no tokens."""
    async with ScriptedOpenAI(ids="none").serving() as server, connected(server) as engine:
        lines = "".join(event(choices=[{"text": part}]) for part in parts)
        server.events_instead = [
            lines if goes_on else lines + event(choices=[{"text": "", "finish_reason": "stop"}])
        ]
        chunk = await generated(engine, max_tokens=5)
    text = "a" * (5 + SPARE + 1)
    assert (chunk.text, chunk.finish_reason) == (text, "length")
    assert chunk.token_ids == TOKENIZER.encode(text).ids


async def test_log_probabilities_that_nobody_asked_for_are_not_read():
    async with ScriptedOpenAI().serving() as server, connected(server) as engine:
        part = {"text": "a", "token_ids": [67], "logprobs": {"tokens": 5}, "finish_reason": "stop"}
        server.events_instead = [event(choices=[part])]
        chunk = await generated(engine)
    assert (chunk.text, chunk.logprobs) == ("a", None)


@pytest.mark.parametrize("then", ["data: {no json\n\n", event(error="late"), "\n" * (2 << 20)])
async def test_what_follows_a_complete_answer_does_not_undo_it(then):
    async with ScriptedOpenAI().serving() as server, connected(server) as engine:
        part = {"text": "a", "token_ids": [67], "finish_reason": "length"}
        server.events_instead = [event(choices=[part]) + then]
        chunk = await generated(engine)
    assert (chunk.text, chunk.finish_reason) == ("a", "length")


@pytest.mark.parametrize(
    "again", [b"10000\r\n%b\r\n" % (b"x" * 65536), b"1\r\n\n\r\n" * 8192, b"2\r\n:\n\r\n" * 8192]
)
async def test_endless_streams(again):
    async with (
        RawServer(HEAD, again).serving() as raw,
        ScriptedOpenAI().serving() as server,
        connected(server) as engine,
    ):
        engine._http = HttpClient(raw.url)
        with pytest.raises(EngineUnreachable):
            await (await engine.start_generate(CALL, {})).next()


async def test_chunks_keep_their_distance_and_their_size():
    async with ScriptedOpenAI().serving() as server, connected(server) as engine:
        stream = await engine.start_generate({**CALL, "stream_tokens": 8}, {})
        sizes = [len((await stream.next()).token_ids)]
        while sum(sizes) < 30:
            sizes.append(len((await stream.next()).token_ids))
        assert all(size >= 8 for size in sizes[1:-1])
        stream = await engine.start_generate({**CALL, "stream_ms": 10_000.0}, {})
        chunks = [await stream.next()]
        while chunks[-1].finish_reason is None:
            chunks.append(await stream.next())
        assert len(chunks) <= 2  # the first and the last ones do not wait


async def test_the_calls_about_kv_are_refused():
    async with ScriptedOpenAI().serving() as server, connected(server) as engine:
        for call in ("prep_recv", "remote_send", "mirror", "commit", "pin", "unpin"):
            with pytest.raises(Unsupported, match=call):
                await getattr(engine, call)({}, {})
        with pytest.raises(Unsupported, match="statistics"):
            await engine.statistics()
        with pytest.raises(Unsupported, match="prefixes"):
            await anext(engine.prefixes())
        with pytest.raises(Unsupported, match="leases"):
            await engine.start_generate({**CALL, "lease_id": "a"}, {})
        info = await engine.model()
        assert (info.capabilities, info.context_length, info.name) == ([], 512, "m")


async def test_health_and_epochs():
    async with ScriptedOpenAI().serving() as server, connected(server) as engine:
        await engine.health()
        server.health = 404  # it has no such path, but lists its models
        await engine.health()
        url, before = server.url, await engine.state()
        address = ServerAddress.parse(url)
    async with asyncio.TaskGroup() as tasks:
        engine = OpenAIEngine(address, HttpClient(address.base), Descriptions(FILES), tasks)
        with pytest.raises(NobodyListens):
            await engine.health()
        async with ScriptedOpenAI(health=503).serving(int(url.rpartition(":")[2])) as server:
            with pytest.raises(NoCapacity):
                await engine.health()
            server.health = 200
            await engine.health()
            assert (await engine.state()).epoch == before.epoch + 1


async def test_load_from_the_servers_metrics():
    text = (
        "# HELP vllm:num_requests_running a\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 2.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="m"} 1.0\n'
    )
    server = ScriptedOpenAI(more={"/metrics": (200, text)})
    async with server.serving(), connected(server) as engine:
        state = await engine.state()
    assert (state.running, state.waiting) == (5, 1)


async def test_metrics_that_are_too_long_do_no_harm():
    server = ScriptedOpenAI(more={"/metrics": (200, "# x\n" * (2 << 20))})
    async with server.serving(), connected(server) as engine:
        assert (await engine.state()).running == 0
        await engine.health()


@pytest.mark.parametrize(
    ("models", "query", "error", "message"),
    [
        ([{"id": "a"}, {"id": "b"}], "", Conflict, r"choose one with \?model=NAME"),
        ([{"id": "a"}], "?model=c", Conflict, "does not serve 'c', but a"),
        ([], "", BadReply, "no model"),
        ([5, {"id": ""}], "", BadReply, "no model"),
    ],
)
async def test_which_model(models, query, error, message):
    server = ScriptedOpenAI(models=models)
    async with server.serving(), connected(server.url + query, known=False) as engine:
        with pytest.raises(error, match=message):
            await engine.model()
        if error is Conflict and not query:
            async with connected(f"{server.url}?model=b") as chosen:
                assert (await chosen.model()).name == "b"


async def test_the_context_of_servers_that_list_none():
    server = ScriptedOpenAI(models=[{"id": "m"}])
    async with server.serving(), connected(server) as engine:
        assert (await engine.model()).context_length == 2048  # the model's
        server.more["/info"] = (200, "<html>Welcome</html>")
        assert (await engine.model()).context_length == 2048
        server.more["/info"] = (200, {"max_total_tokens": 77})
        assert (await engine.model()).context_length == 77
        server.more["/props"] = (200, {"default_generation_settings": {"n_ctx": 99}})
        assert (await engine.model()).context_length == 99


async def test_a_server_without_a_tokenizer():
    async with ScriptedOpenAI().serving() as server, connected(server, None, known=False) as engine:
        with pytest.raises(Conflict, match="--openai-tokenizer"):
            await engine.model()


async def test_a_server_that_refuses_every_request():
    server = ScriptedOpenAI(refuse=[(400, {"error": "no prompts"}, {})] * 2)
    async with server.serving(), connected(server, known=False) as engine:
        with pytest.raises(BadRequest, match="no prompts"):
            await engine.model()
        assert (await engine.model()).name == "m"


async def test_the_key_is_sent():
    async with ScriptedOpenAI().serving() as server, connected(server, api_key="sk-1") as engine:
        await generated(engine)
    assert {one["authorization"] for one in server.headers} == {"Bearer sk-1"}

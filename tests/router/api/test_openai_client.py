"""The official `openai` client against a real router and real engines."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, Literal

import aiohttp
import openai
import pytest
from engine_process import EngineProcess
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from router.base.config import RouterConfig
from router.server import serving

MESSAGES = [{"role": "user", "content": "hello, wörld 🌍"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "seed": 3}
PROMPT: dict[str, Any] = {"model": "tiny", "prompt": "once upon", "max_tokens": 8, "seed": 3}
LONG: dict[str, Any] = {**PROMPT, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}


class Point(BaseModel):
    colour: Literal["red", "green"]
    x: int = Field(ge=0, le=9)


@asynccontextmanager
async def clients(router: Any, **options: Any) -> AsyncIterator[AsyncOpenAI]:
    settings = {"api_key": "none", "max_retries": 0, **options}
    async with AsyncOpenAI(base_url=router.server.url + "/v1", **settings) as client:
        yield client


@asynccontextmanager
async def routed(urls: list[str], **config: Any) -> AsyncIterator[SimpleNamespace]:
    """A router in front of these engines, and an `openai` client of it."""
    settings = {"port": 0, "shutdown_s": 0.2, **config}
    async with (
        serving(RouterConfig(engines=tuple(urls), **settings)) as server,
        aiohttp.ClientSession() as http,
    ):
        yield SimpleNamespace(server=server, http=http)


@pytest.fixture(scope="module")
def small_engine() -> Iterator[EngineProcess]:
    """An engine that two requests fill."""
    engine = EngineProcess("--max-batch", "1", "--max-waiting", "1", "--pool-pages", "1024")
    yield engine
    engine.kill()


@pytest.fixture
def route_small(small_engine: EngineProcess):
    return lambda **config: routed([small_engine.url], **config)


@pytest.mark.processes
async def test_chat_whole_and_streamed_are_the_same(route_real):
    async with route_real() as r, clients(r) as client:
        whole = await client.chat.completions.create(**CHAT)
        stream = await client.chat.completions.create(
            **CHAT, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        again = await client.chat.completions.create(**CHAT)  # round robin: the first engine again
    assert again.usage.prompt_tokens_details.cached_tokens == 32
    assert again.choices == whole.choices
    assert whole.object == "chat.completion" and whole.id.startswith("chatcmpl-")
    assert whole.system_fingerprint.startswith("fp_") and whole.created > 1_700_000_000
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.refusal is None
    *parts, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in parts) == (
        whole.choices[0].message.content
    )
    assert parts[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in parts] == (
        [None] * (len(parts) - 1) + [whole.choices[0].finish_reason]
    )
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.system_fingerprint) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in parts)
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.processes
async def test_completions_whole_and_streamed_are_the_same(route_real):
    async with route_real() as r, clients(r) as client:
        asked = PROMPT | {"prompt": "wörld 🌍", "n": 2, "echo": True}
        whole = await client.completions.create(**asked)
        stream = await client.completions.create(**asked, stream=True)
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert whole.object == "text_completion" and whole.id.startswith("cmpl-")
    assert texts == [choice.text for choice in whole.choices]
    assert all(text.startswith("wörld 🌍") for text in texts)
    assert texts[0] != texts[1]


def use_the_client_without_asyncio(url: str) -> None:
    with OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").owned_by == "microserve"
        whole = client.chat.completions.create(**CHAT, n=3)
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        contents = ["", "", ""]
        with client.chat.completions.create(**CHAT, n=3, stream=True) as stream:
            for chunk in stream:
                for choice in chunk.choices:
                    contents[choice.index] += choice.delta.content or ""
        assert contents == [choice.message.content for choice in whole.choices]


@pytest.mark.processes
async def test_the_client_without_asyncio(route_real):
    async with route_real(strategy="prefill_decode") as r:
        await asyncio.to_thread(use_the_client_without_asyncio, r.server.url)


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["data_parallel", "prefill_decode"])
async def test_structured_outputs_are_parsed(route_real, strategy):
    wanted: dict[str, Any] = {**CHAT, "max_tokens": 300, "response_format": Point}
    async with route_real(strategy=strategy) as r, clients(r) as client:
        parsed = await client.chat.completions.parse(**wanted, n=2)
        for choice in parsed.choices:
            assert isinstance(choice.message.parsed, Point)
            assert choice.finish_reason == "stop"
        async with client.chat.completions.stream(**wanted) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == parsed.choices[0].message.parsed
        anything = await client.chat.completions.create(
            **CHAT | {"max_tokens": 400}, response_format={"type": "json_object"}, temperature=0
        )
        assert anything.choices[0].message.content.lstrip().startswith("{")
        with pytest.raises(openai.LengthFinishReasonError):
            await client.chat.completions.parse(**wanted | {"max_tokens": 2})


@pytest.mark.processes
async def test_vllm_fields_for_structured_outputs(route_real):
    cases = [
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, r"[0-9]{3}"),
        ({"structured_outputs": {"choice": ["yes", 'n"ö']}}, r'yes|n"ö'),
        ({"structured_outputs": {"grammar": 'root ::= "a" "b"*'}}, "ab*"),
        ({"structured_outputs": {"grammar": 'start: "a" "b"'}}, "ab"),
        ({"structured_outputs": {"json": {"enum": [1, 2]}}}, "[12]"),
        ({"guided_regex": "[a-z]{2}"}, "[a-z]{2}"),
        ({"guided_choice": ["x"]}, "x"),
        ({"guided_json": '{"const": "k"}'}, '"k"'),
        ({"guided_grammar": 'root ::= "g"'}, "g"),
    ]
    async with route_real() as r, clients(r) as client:
        for extra, pattern in cases:
            answer = await client.completions.create(
                **PROMPT | {"max_tokens": 60, "temperature": 0}, extra_body=extra
            )
            assert answer.choices[0].finish_reason == "stop", extra
            text = answer.choices[0].text
            assert re.fullmatch(pattern, text), (extra, text)
        for extra, param in [
            ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
            ({"guided_grammar": "root ::= nothing"}, "guided_grammar"),
            ({"response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
             "response_format"),
        ]:  # fmt: skip
            with pytest.raises(openai.BadRequestError) as refused:
                await client.completions.create(**PROMPT, extra_body=extra)
            assert refused.value.param == param


@pytest.mark.processes
async def test_logprobs(route_real):
    async with route_real() as r, clients(r) as client:
        chat = await client.chat.completions.create(
            **CHAT, logprobs=True, top_logprobs=2, temperature=0
        )
        content = chat.choices[0].logprobs.content
        assert len(content) == chat.usage.completion_tokens
        for token in content:
            assert len(token.top_logprobs) == 2
            assert (token.token, token.logprob) == (
                token.top_logprobs[0].token, token.top_logprobs[0].logprob,
            )  # fmt: skip
            assert token.logprob <= 0
        joined = b"".join(bytes(token.bytes) for token in content)
        assert joined.decode(errors="replace") == chat.choices[0].message.content
        none = await client.chat.completions.create(**CHAT, logprobs=True, temperature=0)
        assert all(token.top_logprobs == [] for token in none.choices[0].logprobs.content)
        plain = await client.chat.completions.create(**CHAT)
        assert plain.choices[0].logprobs is None
        whole = await client.completions.create(**PROMPT, logprobs=3, temperature=0)
        stream = await client.completions.create(**PROMPT, logprobs=3, temperature=0, stream=True)
        streamed = [c.choices[0].logprobs async for c in stream if c.choices[0].logprobs]
    logprobs, text = whole.choices[0].logprobs, whole.choices[0].text
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 8
    assert all(len(top) == 3 for top in logprobs.top_logprobs)
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token)
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for part in streamed for x in getattr(part, name)] == getattr(logprobs, name)


@pytest.mark.processes
async def test_stop_strings_may_span_tokens(route_real):
    async with route_real() as r, clients(r) as client:
        whole = (await client.completions.create(**PROMPT, temperature=0)).choices[0].text
        stop = whole[3:6]  # tokens are single bytes, or fillers of five characters
        cut = whole[: whole.index(stop)]
        answer = await client.completions.create(**PROMPT, temperature=0, stop=[stop])
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (cut, "stop")
        stream = await client.completions.create(**PROMPT, temperature=0, stop=stop, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == cut
        kept = await client.completions.create(
            **PROMPT, temperature=0, stop=stop, extra_body={"include_stop_str_in_output": True}
        )
        assert kept.choices[0].text == cut + stop


@pytest.mark.processes
async def test_raw_responses_and_request_ids(route_real):
    async with route_real() as r, clients(r) as client:
        raw = await client.chat.completions.with_raw_response.create(
            **CHAT, extra_headers={"X-Request-Id": "my-own"}
        )
        assert raw.headers["x-request-id"] == "my-own"
        assert raw.parse().id == "chatcmpl-my-own"
        assert (await client.chat.completions.create(**CHAT))._request_id
        async with client.chat.completions.with_streaming_response.create(
            **CHAT, stream=True
        ) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line async for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"


@pytest.mark.processes
async def test_a_served_model_name(route_real):
    async with route_real(served_model_name="gpt-tiny") as r, clients(r) as client:
        assert (await client.models.retrieve("gpt-tiny")).root == "tiny"
        answer = await client.chat.completions.create(**CHAT | {"model": "gpt-tiny"})
        assert answer.model == "gpt-tiny"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(**CHAT)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("tiny")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("change", "error", "code", "param"),
    [
        ({"temperature": 2.5}, openai.BadRequestError, None, "temperature"),
        ({"seed": 2**70}, openai.BadRequestError, None, "seed"),
        ({"max_tokens": 9000}, openai.BadRequestError, "context_length_exceeded", "messages"),
        ({"max_completion_tokens": 5}, openai.BadRequestError, "invalid_parameter_combination",
         "max_tokens"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError,
         "unsupported_parameter", "tools"),
        ({"model": "gpt-5"}, openai.NotFoundError, "model_not_found", "model"),
    ],
)  # fmt: skip
async def test_errors_are_of_the_right_class(route_real, change, error, code, param):
    async with route_real() as r, clients(r) as client:
        with pytest.raises(error) as caught:
            await client.chat.completions.create(**CHAT | change)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


@pytest.mark.processes
async def test_unknown_paths_and_methods_have_error_objects(route_real):
    async with route_real(max_body_mb=1) as r, clients(r) as client:
        with pytest.raises(openai.NotFoundError, match="/v1/nothing"):
            await client.get("/nothing", cast_to=object)
        with pytest.raises(openai.APIStatusError) as refused:
            await client.delete("/completions", cast_to=object)
        assert (refused.value.status_code, refused.value.code) == (405, "method_not_allowed")
        with pytest.raises(openai.APIStatusError) as refused:
            await client.completions.create(**PROMPT | {"prompt": "a" * 2**20})
        assert (refused.value.status_code, refused.value.code) == (413, "too_large")


@pytest.mark.processes
async def test_keys(route_real):
    async with route_real(api_key="right") as r:
        async with clients(r, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError) as refused:
                await client.chat.completions.create(**CHAT)
            assert refused.value.code == "invalid_api_key"
        async with clients(r, api_key="right") as client:
            assert (await client.chat.completions.create(**CHAT)).choices


async def test_without_engines():
    async with routed([]) as r, clients(r) as client:
        with pytest.raises(openai.InternalServerError) as failed:
            await client.chat.completions.create(**CHAT)
    assert (failed.value.status_code, failed.value.code) == (503, "no_engines")


@pytest.mark.processes
async def test_a_full_engine_is_a_rate_limit_error_that_the_client_retries(
    route_small, small_engine
):
    async with route_small(queue_timeout_s=0.05) as r, clients(r) as client:
        streams = [await client.completions.create(**LONG, stream=True)]
        other = asyncio.create_task(client.completions.create(**LONG, stream=True))
        while small_engine.state()["waiting"] == 0:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
        with pytest.raises(openai.RateLimitError) as full:
            await client.completions.create(**PROMPT)
        assert full.value.code == "no_capacity"
        assert int(full.value.response.headers["retry-after"]) >= 1
        patient = client.with_options(max_retries=5)
        retried = asyncio.create_task(patient.completions.create(**PROMPT))
        url = r.server.url + "/metrics"
        while not re.search('status="429"} [2-9]', await (await r.http.get(url)).text()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await streams[0].close()
        other.cancel()
        assert (await retried).usage.completion_tokens == 8
    await asyncio.to_thread(small_engine.at_rest)


@pytest.mark.processes
async def test_a_timeout_ends_the_generation(route_small, small_engine):
    async with route_small() as r, clients(r) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.2).completions.create(**LONG)
        await asyncio.to_thread(small_engine.at_rest)


@pytest.mark.processes
async def test_cancellation_ends_the_generation(route_small, small_engine):
    async with route_small() as r, clients(r) as client:
        whole = asyncio.create_task(client.completions.create(**LONG))
        stream = await client.completions.create(**LONG, stream=True)
        await asyncio.sleep(0.1)
        whole.cancel()
        with pytest.raises(asyncio.CancelledError):
            await whole
        await stream.close()
        await asyncio.to_thread(small_engine.at_rest)


@pytest.mark.processes
async def test_a_failure_in_mid_stream_raises():
    engine = EngineProcess("--pool-pages", "1024")
    try:
        async with routed([engine.url], attempts=1) as r, clients(r) as client:
            stream = await client.completions.create(**LONG, n=2, stream=True)
            received = 0
            with pytest.raises(openai.APIError) as failed:
                async for _ in stream:
                    received += 1
                    if received == 3:
                        engine.kill()
            assert received >= 3
            assert failed.value.body["type"] == "peer_unreachable"
            async with r.http.post(r.server.url + "/v1/completions", json=PROMPT) as refused:
                assert refused.status == 503
    finally:
        engine.kill()

"""The main paths against two real engine processes with the model `tiny`."""

from __future__ import annotations

import asyncio

import pytest
from openai import AsyncOpenAI

pytestmark = pytest.mark.processes

PROMPT = [(7 * i * i + 3 * i) % 500 + 1 for i in range(150)]
STRATEGIES = [
    ("data_parallel", {}), ("prefill_decode", {}), ("balanced", {"ratio": 0.3}),
    ("balanced", {"ratio": 1.0}),
]  # fmt: skip


def shifted(by: int) -> list[int]:
    """Return a prompt that shares no prefix with the others."""
    return [(token + by) % 500 + 1 for token in PROMPT]


async def test_every_strategy_gives_the_same_tokens(route_real):
    for sampling in ({"temperature": 0}, {"temperature": 1, "seed": 11, "top_p": 0.9}):
        answers = set()
        for name, params in STRATEGIES:
            async with route_real(strategy=name, params=params) as r:
                body = {
                    "model": "tiny", "prompt": shifted(1), "max_tokens": 32, "ignore_eos": True,
                    "return_token_ids": True, **sampling,
                }  # fmt: skip
                status, answer = await r.post("/v1/completions", body)
                assert status == 200, answer
                answers.add(
                    (tuple(answer["choices"][0]["token_ids"]), answer["choices"][0]["text"])
                )
        (one,) = answers
        assert len(set(one[0])) > 10


async def test_streamed_and_whole_answers_are_equal(route_real):
    body = {"prompt": shifted(2), "max_tokens": 24, "temperature": 0, "return_token_ids": True}
    async with route_real(strategy="prefill_decode") as r:
        events = await r.events("/v1/completions", body)
        _, whole = await r.post("/v1/completions", body)
    choice = whole["choices"][0]
    streamed = [c for e in events[:-1] for c in e["choices"]]
    assert "".join(c["text"] for c in streamed) == choice["text"]
    assert [t for c in streamed for t in c["token_ids"]] == choice["token_ids"]
    assert streamed[-1]["finish_reason"] == choice["finish_reason"]


async def test_the_receipt_counts_put_tokens(route_real):
    async with route_real(strategy="prefill_decode") as r:
        body = {"prompt": shifted(3), "max_tokens": 2, "ignore_eos": True}
        await r.post("/v1/completions", body, headers={"X-Request-Id": "put"})
        prep, send, start = (await r.receipt("put"))["legs"]
        kv_bytes = r.server.router.registry.model.info.kv_bytes_per_token
    assert (prep["match_len"], prep["end"]) == (0, 149)
    assert (send["sent_tokens"], send["computed_tokens"]) == (149, 149)
    assert send["bytes"] == 149 * kv_bytes
    assert (start["begin"], start["computed_tokens"], start["tokens"]) == (149, 1, 2)
    assert prep["engine"] == start["engine"] != send["engine"]


async def test_nothing_remains_on_the_engines(route_real):
    async with route_real(strategy="prefill_decode") as r:
        async with asyncio.TaskGroup() as tasks:
            asks = [
                tasks.create_task(
                    r.events("/v1/completions", {"prompt": shifted(10 + i), "max_tokens": 8})
                )
                for i in range(6)
            ]
        assert all(ask.result()[-1] == "[DONE]" for ask in asks)
        url = r.server.url + "/v1/completions"
        body = {"prompt": shifted(20), "max_tokens": 2000, "stream": True, "ignore_eos": True}
        async with r.http.post(url, json=body) as response:
            await response.content.readany()
            response.close()
        await r.settled()
        for backend in r.server.router.registry:
            async with asyncio.timeout(30):
                while True:
                    state = await backend.client.state()
                    pages = state.pages
                    free = pages.free + pages.cached == pages.total
                    if free and not state.leases and not state.running:
                        break


async def test_the_official_client(route_real):
    async with route_real(strategy="balanced") as r:
        client = AsyncOpenAI(base_url=r.server.url + "/v1", api_key="none", max_retries=0)
        async with client:
            assert [model.id async for model in client.models.list()] == ["tiny"]
            chat = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=5, n=2,
                logprobs=True, top_logprobs=2, seed=3,
            )  # fmt: skip
            assert [choice.index for choice in chat.choices] == [0, 1]
            assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens // 2
            assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
            stream = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=5,
                stream=True, stream_options={"include_usage": True}, temperature=0,
            )  # fmt: skip
            chunks = [chunk async for chunk in stream]
            assert chunks[0].choices[0].delta.role == "assistant"
            assert chunks[-1].usage.completion_tokens == 5
            completion = await client.completions.create(
                model="tiny", prompt="hello", max_tokens=5, logprobs=2, temperature=0
            )
            assert len(completion.choices[0].logprobs.tokens) == 5
            assert completion.choices[0].logprobs.text_offset[0] == 0


@pytest.mark.parametrize("bias", [100, -100])
async def test_logit_bias_reaches_the_sampler(route_real, bias):
    async with route_real() as r:
        body = {
            "prompt": shifted(4), "max_tokens": 4, "temperature": 0, "return_token_ids": True,
            "logit_bias": {"77": bias}, "ignore_eos": True,
        }  # fmt: skip
        status, answer = await r.post("/v1/completions", body)
        assert status == 200, answer
        tokens = answer["choices"][0]["token_ids"]
        assert (tokens == [77] * 4) if bias > 0 else (77 not in tokens)

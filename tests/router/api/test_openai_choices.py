"""`n` > 1 and lists of prompts, against real engines.

Each choice has the tokens that it has alone, and each prompt is computed once.
"""

from __future__ import annotations

import asyncio
import json
import re

import aiohttp
import pytest
from engine_process import EngineProcess

pytestmark = pytest.mark.processes

PROMPT = [(7 * i * i + 3 * i) % 500 + 1 for i in range(150)]
SAMPLING = {
    "max_tokens": 12, "temperature": 1, "seed": 11, "ignore_eos": True, "return_token_ids": True,
}  # fmt: skip
STRATEGIES = ["data_parallel", "prefill_decode"]


def fresh(by: int, length: int = 150) -> list[int]:
    """Return a prompt that shares no prefix with another test's."""
    return [(token * 3 + by * 7 + 5) % 500 + 1 for token in PROMPT[:length]]


async def computed(router) -> int:
    """Return how many prompt tokens the engines have computed since they started."""
    total = 0
    for backend in router.server.router.registry:
        async with router.http.get(backend.url + "/metrics") as response:
            text = await response.text()
        total += int(float(re.search(r"^vllm:prompt_tokens_total{.*} (.+)$", text, re.M)[1]))
    return total


def tokens_of(answer: dict) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


async def alone(router, prompt: list[int], choice: int) -> list[int]:
    """Return the tokens of one choice, requested from an engine directly."""
    backend = next(iter(router.server.router.registry))
    body = {
        "request_id": f"alone-{prompt[0]}-{len(prompt)}-{choice}", "prompt": prompt,
        "choice": choice, "max_tokens": 12, "seed": 11, "ignore_eos": True,
    }  # fmt: skip
    async with aiohttp.ClientSession() as http:
        url = backend.url + "/microserving/start_generate"
        async with http.post(url, json=body) as response:
            lines = (await response.text()).split("\n\n")
    events = [json.loads(line[6:]) for line in lines if line]
    return [token for event in events for token in event["token_ids"]]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("length", [149, 145])  # the last page has five tokens, or one
async def test_choices_share_one_prefill(route_real, strategy, length):
    prompt = fresh(STRATEGIES.index(strategy) + 10 * length, length)
    async with route_real(strategy=strategy) as r:
        before = await computed(r)
        status, cold = await r.post("/v1/completions", {"prompt": prompt, "n": 4, **SAMPLING})
        assert status == 200, cold
        assert await computed(r) - before == length - 1
        assert cold["usage"]["prompt_tokens"] == length
        assert cold["usage"]["completion_tokens"] == 4 * 12
        before = await computed(r)
        _, warm = await r.post("/v1/completions", {"prompt": prompt, "n": 4, **SAMPLING})
        # The prefix cache holds full pages, of both engines where both had a part in it; the round
        # robin asks the other one now.
        rest = (length - 1) % 16 if strategy == "prefill_decode" else length - 1
        assert await computed(r) - before == rest
        assert tokens_of(warm) == tokens_of(cold)
        assert tokens_of(cold) == [await alone(r, prompt, choice) for choice in range(4)]
    assert len({tuple(tokens) for tokens in tokens_of(cold)}) == 4


async def test_a_warm_prompt_is_not_computed_again(route_real):
    prompt = fresh(70)
    async with route_real() as r:
        for _ in range(2):  # one request for each engine
            await r.post("/v1/completions", {"prompt": prompt, **SAMPLING})
        before = await computed(r)
        _, answer = await r.post("/v1/completions", {"prompt": prompt, "n": 5, **SAMPLING})
        assert await computed(r) - before == 149 - 144
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 144}


async def test_choices_of_one_token_share_the_prefill_too(route_real):
    """The first choice ends before the others start."""
    prompt = fresh(80)
    async with route_real() as r:
        before = await computed(r)
        body = {"prompt": prompt, "n": 8, **SAMPLING, "max_tokens": 1}
        _, answer = await r.post("/v1/completions", body)
        assert await computed(r) - before == 149
    assert len(answer["choices"]) == 8


async def test_each_choice_ends_on_its_own(route_real):
    prompt = fresh(90)
    async with route_real(strategy="prefill_decode") as r:
        _, whole = await r.post("/v1/completions", {"prompt": prompt, "n": 3, **SAMPLING})
        stop = whole["choices"][0]["token_ids"][2]
        body = {"prompt": prompt, "n": 3, **SAMPLING, "stop_token_ids": [stop]}
        _, cut = await r.post("/v1/completions", body)
        events = await r.events("/v1/completions", body)
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["choices"][0]["stop_reason"] == stop
    for before, after in zip(tokens_of(whole), tokens_of(cut), strict=True):
        assert after == before[: before.index(stop) + 1 if stop in before else None]
    streamed: list[list[int]] = [[], [], []]
    for event in events[:-1]:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["token_ids"]
    assert streamed == tokens_of(cut)


async def test_a_disconnect_ends_all_choices(route_real):
    async with route_real(strategy="prefill_decode") as r:
        body = {"prompt": fresh(100), "n": 4, **SAMPLING, "max_tokens": 2000, "stream": True}
        async with r.http.post(r.server.url + "/v1/completions", json=body) as response:
            await response.content.readany()
            response.close()
        await r.settled()
        for backend in r.server.router.registry:
            async with asyncio.timeout(30):
                while True:
                    state = await backend.client.state()
                    free = state.pages.free + state.pages.cached == state.pages.total
                    if free and not (state.running or state.waiting or state.leases):
                        break


async def test_many_prompts_with_many_choices(route_real):
    prompts = [fresh(110), fresh(111, 40), fresh(110)]
    async with route_real() as r:
        body = {"prompt": prompts, "n": 2, **SAMPLING}
        status, answer = await r.post("/v1/completions", body)
        assert status == 200, answer
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        singly = [
            (await r.post("/v1/completions", {**body, "prompt": prompt}))[1] for prompt in prompts
        ]
    assert tokens_of(answer) == [tokens for one in singly for tokens in tokens_of(one)]
    assert answer["usage"]["prompt_tokens"] == 150 + 40 + 150
    texts = ["".join(map(chr, range(97, 110))), "another"]
    async with route_real() as r:
        _, answer = await r.post("/v1/completions", {"prompt": texts, **SAMPLING})
        for choice, text in zip(answer["choices"], texts, strict=True):
            _, tokenized = await r.post("/tokenize", {"prompt": text, "return_token_strs": True})
            assert choice["prompt_token_ids"] == tokenized["tokens"]
            assert tokenized["token_strs"] == list(text)
            _, back = await r.post("/detokenize", {"tokens": tokenized["tokens"]})
            assert back == {"prompt": text}
    assert answer["usage"]["prompt_tokens"] == sum(map(len, texts))


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_choices_survive_the_death_of_their_engine(routed_to, strategy):
    """Each goes on by itself where its stream has stopped, with the tokens it would have had."""
    flags = ("--pool-pages", "1024")
    first, second = EngineProcess(*flags), EngineProcess(*flags)
    survivor = None
    prompt = fresh(120)
    body = {"prompt": prompt, "n": 3, **SAMPLING, "max_tokens": 120, "stream": True}
    try:
        async with routed_to([first.url, second.url], strategy=strategy) as r:
            tokens: list[list[int]] = [[], [], []]
            headers = {"X-Request-Id": "survivor"}
            url = r.server.url + "/v1/completions"
            async with r.http.post(url, json=body, headers=headers) as response:
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        tokens[choice["index"]] += choice["token_ids"]
                    if survivor is None and min(map(len, tokens)) > 5:
                        legs = (await r.receipt("survivor"))["legs"]
                        busy = [leg for leg in legs if leg["call"] == "start_generate"]
                        (engine,) = {leg["engine"] for leg in busy}
                        first_is_busy = first.url.endswith(engine.split(":")[-1])
                        survivor, victim = (second, first) if first_is_busy else (first, second)
                        victim.kill()
            receipt = await r.receipt("survivor")
            assert {retry["choice"] for retry in receipt["retries"]} == {0, 1, 2}
            assert survivor is not None
            whole = [
                survivor.generate(prompt, choice=choice, **_engine_sampling(120))
                for choice in range(3)
            ]
            await asyncio.to_thread(survivor.at_rest)
    finally:
        first.kill()
        second.kill()
    assert tokens == [[token for event in one for token in event["token_ids"]] for one in whole]


def _engine_sampling(max_tokens: int) -> dict[str, object]:
    return {"temperature": 1.0, "seed": 11, "max_tokens": max_tokens, "ignore_eos": True}

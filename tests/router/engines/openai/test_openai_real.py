"""A router in front of routers that are OpenAI servers, each with an engine of its own."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from engine_process import EngineProcess
from router_process import RouterProcess, until

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PROMPT = [(7 * i * i + 3 * i) % 250 + 1 for i in range(40)]
JSON = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class OpenAIServer:
    """An engine, and a router in front of it: an OpenAI server with `return_token_ids`."""

    def __init__(self) -> None:
        self.engine = EngineProcess("--dtype", "float32")
        self.router = RouterProcess([self.engine.url], "data_parallel")
        self.http = self.router.http
        self.url = self.router.url.replace("http", "openai+http", 1)

    def kill(self) -> None:
        self.router.kill()
        self.engine.kill()


@pytest.fixture(scope="module")
def servers() -> Iterator[list[OpenAIServer]]:
    started = [OpenAIServer() for _ in range(2)]
    yield started
    for server in started:
        server.kill()


@pytest.fixture(scope="module")
def front(servers: list[OpenAIServer]) -> Iterator[RouterProcess]:
    router = RouterProcess(
        [server.url for server in servers], "data_parallel", "--openai-tokenizer", "tiny"
    )
    until(lambda: ups(router) == 2)
    yield router
    router.kill()


def ups(router: RouterProcess) -> int:
    listed = router.http.get("/admin/engines").json()["engines"]
    return sum(one["status"] == "up" for one in listed)


def body(**fields: Any) -> dict[str, Any]:
    return {
        "prompt": PROMPT, "max_tokens": 48, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **fields,
    }  # fmt: skip


def streamed(http: httpx.Client, ask: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with http.stream("POST", "/v1/completions", json={**ask, "stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"n": 2}, {"logprobs": 3}, {"logprobs": 0}, {"stop": ["<3", "z"]}, {"min_tokens": 5},
        {"stop_token_ids": [300, 400], "min_tokens": 4}, {"logit_bias": {"300": 50, "301": 51}},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5}, {"repetition_penalty": 1.3},
        {"skip_special_tokens": False}, {"include_stop_str_in_output": True, "stop": ["3"]},
        {"prompt": ["one prompt", "another"]}, {"temperature": 0.9, "seed": 7, "top_k": 5},
        {"temperature": 0.7, "seed": 8, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)  # fmt: skip
def test_answers_are_those_of_the_server(servers, front, fields):
    ask = body(**fields)
    direct, through = (
        http.post("/v1/completions", json=ask) for http in (servers[0].http, front.http)
    )
    assert direct.status_code == through.status_code == 200, through.text
    expected, got = direct.json(), through.json()
    assert got["choices"] == expected["choices"]
    for name in ("prompt_tokens", "completion_tokens"):
        assert got["usage"][name] == expected["usage"][name]
    if len(expected["choices"]) > 1:
        return
    parts = [event["choices"][0] for event in streamed(front.http, ask)]
    assert "".join(part["text"] for part in parts) == expected["choices"][0]["text"]
    tokens = [token for part in parts for token in part["token_ids"]]
    assert tokens == expected["choices"][0]["token_ids"]


def test_chat(servers, front):
    ask = {
        "messages": [{"role": "user", "content": "Gr\u00fc\u00dfe"}], "max_tokens": 24,
        "temperature": 0, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    direct, through = (
        http.post("/v1/chat/completions", json=ask).json() for http in (servers[0].http, front.http)
    )
    assert through["choices"] == direct["choices"]


@pytest.mark.parametrize(
    "wanted",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": JSON}}},
        {"structured_outputs": {"regex": "[a-c]{3}-[0-9]{4}"}},
        {"structured_outputs": {"choice": ["red", "green"]}},
    ],
    ids=str,
)
def test_structured_outputs(servers, front, wanted):
    pytest.importorskip("xgrammar")
    ask = {**body(**wanted), "ignore_eos": False}
    direct, through = (
        http.post("/v1/completions", json=ask).json() for http in (servers[0].http, front.http)
    )
    assert through["choices"] == direct["choices"]


def test_the_servers_refusal_reaches_the_client(front):
    reply = front.http.post("/v1/completions", json=body(max_tokens=100_000))
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    reply = front.http.post("/v1/completions", json=body(structured_outputs={"regex": "("}))
    assert reply.status_code == 400, reply.text


@pytest.mark.parametrize("victim", [pytest.param("router", marks=pytest.mark.thorough), "engine"])
def test_a_server_is_killed_in_mid_stream(victim):
    """The other one goes on: nothing is repeated or lost."""
    servers = [OpenAIServer() for _ in range(2)]
    front = RouterProcess(
        [server.url for server in servers], "data_parallel", "--openai-tokenizer", "tiny",
        "--stream-interval-ms", "0",
    )  # fmt: skip
    try:
        until(lambda: ups(front) == 2)
        ask = body(max_tokens=1500)
        expected = servers[1].http.post("/v1/completions", json=ask).json()["choices"][0]
        text, tokens, killed = "", [], False
        for event in streamed(front.http, ask):
            assert "error" not in event, event
            (choice,) = event["choices"]
            text, tokens = text + choice["text"], tokens + choice["token_ids"]
            if len(tokens) > 100 and not killed:
                killed = True
                busy = next(server for server in servers if running(server))
                (busy.router if victim == "router" else busy.engine).signal(signal.SIGKILL)
        assert killed and choice["finish_reason"] == "length"
        assert (text, tokens) == (expected["text"], expected["token_ids"])
    finally:
        front.kill()
        for server in servers:
            server.kill()


def running(server: OpenAIServer) -> int:
    count: int = server.engine.state()["running"]
    return count


def test_a_client_that_leaves_frees_the_engine_behind_the_server(servers, front):
    until(lambda: ups(front) == 2)  # a busy host may have held up health checks
    with front.http.stream(
        "POST", "/v1/completions", json=body(max_tokens=4000, stream=True)
    ) as reply:
        lines = reply.iter_lines()  # dropped, it would close the response
        first = next(lines)
        assert reply.status_code == 200, (first, front.http.get("/admin/engines").text)
        until(lambda: sum(map(running, servers)) == 1)
    until(lambda: not sum(map(running, servers)))
    for server in servers:
        server.engine.at_rest()

"""The request-level API's surface, against a scripted engine."""

from __future__ import annotations

import json
import threading

import pytest

from router.api.openai import parsing as reading

ASK = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 3}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 3}


async def test_completion(route, fake):
    a = fake("a")
    async with route(a) as r:
        url = r.server.url + "/v1/completions"
        async with r.http.post(url, json={**ASK, "prompt": "w1 w2 w3"}) as response:
            body = await response.json()
            assert response.headers["X-Request-Id"] == body["id"].removeprefix("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == "fake"
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("w103 w104 w105 ", "length")
    assert "token_ids" not in choice
    assert body["usage"]["total_tokens"] == 6
    assert a.named("start_generate")[0]["prompt"] == [1, 2, 3]


async def test_chat_uses_the_models_template(route, fake):
    a = fake("a")
    message = {"role": "user", "content": [{"type": "text", "text": "w7"}, {"text": "w8"}]}
    async with route(a) as r:
        _, body = await r.post("/v1/chat/completions", {**CHAT, "messages": [message]})
        events = await r.events(
            "/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}
        )
    assert a.named("start_generate")[0]["prompt"] == [7, 8]
    assert body["choices"][0]["message"]["content"] == "w102 w103 w104 "
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(c["delta"].get("content", "") for e in events[:-1] for c in e["choices"]) == (
        "w102 w103 w104 "
    )
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-2]]
    assert [event["usage"] for event in events[:-2]] == [None] * len(reasons)
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 3
    assert events[-1] == "[DONE]"


async def test_an_event_is_one_line_also_for_clients_that_split_at_unicode_line_ends(route, fake):
    text = "a\x85b\u2028c\u2029d\x0be\n\x1cf\u00e9"
    a = fake("a", text=text)
    async with route(a) as r:
        for extra in ({}, {"return_token_ids": True}):
            body = {**ASK, **extra, "stream": True}
            async with r.http.post(r.server.url + "/v1/completions", json=body) as response:
                lines = [line for line in (await response.text()).splitlines() if line]
            assert lines.pop() == "data: [DONE]"
            events = [json.loads(line.removeprefix("data: ")) for line in lines]
            assert "".join(event["choices"][0]["text"] for event in events) == 3 * text


async def test_defaults_of_max_tokens(route, fake):
    a = fake("a")
    async with route(a) as r:
        await r.post("/v1/completions", {"prompt": [1]})
        await r.post("/v1/chat/completions", {"messages": CHAT["messages"]})
    limits = [body.get("max_tokens", 16) for body in a.named("start_generate")]
    assert limits == [16, 254]


async def test_a_seed_is_drawn_and_kept(route, fake):
    a = fake("a")
    async with route(a) as r:
        await r.post("/v1/completions", ASK, headers={"X-Request-Id": "x"})
        assert (await r.receipt("x"))["seed"] == a.named("start_generate")[0]["seed"]
        await r.post("/v1/completions", {**ASK, "seed": 7})
        assert a.named("start_generate")[1]["seed"] == 7


async def test_sampling_reaches_the_engine(route, fake):
    a = fake("a")
    wanted = {
        "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "stop": "x", "seed": 1,
        "presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"5": -100}, "min_tokens": 1,
        "ignore_eos": True, "logprobs": 2,
    }  # fmt: skip
    async with route(a) as r:
        status, _ = await r.post("/v1/completions", {**ASK, **wanted})
        assert status == 200
    sent = a.named("start_generate")[0]
    assert sent["stop"] == ["x"]
    assert sent["logit_bias"] == {"5": -100}
    assert sent["logprobs"] == 2
    assert "top_k" not in sent
    assert {name: sent[name] for name in ("temperature", "top_p", "min_p", "ignore_eos")} == {
        "temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "ignore_eos": True,
    }  # fmt: skip


BAD = [
    ({"prompt": []}, 400, "prompt", None),
    ({"prompt": ""}, 400, "prompt", None),
    ({"prompt": None}, 400, "prompt", None),
    ({"prompt": [1, "x"]}, 400, "prompt", None),
    ({"prompt": [[1], 2]}, 400, "prompt", None),
    ({"prompt": [True]}, 400, "prompt", None),
    ({"prompt": [1000]}, 400, "prompt", None),
    ({"prompt": [-1]}, 400, "prompt", None),
    ({"prompt": [1] * 300}, 400, "prompt", "context_length_exceeded"),
    ({"max_tokens": 254}, 400, "prompt", "context_length_exceeded"),
    ({"max_tokens": 0}, 400, "max_tokens", None),
    ({"max_tokens": "3"}, 400, "max_tokens", None),
    ({"n": 0}, 400, "n", None),
    ({"temperature": -1}, 400, "temperature", None),
    ({"temperature": "hot"}, 400, "temperature", None),
    ({"top_p": 0}, 400, "top_p", None),
    ({"stop": [""]}, 400, "stop[0]", None),
    ({"stop": 3}, 400, "stop", None),
    ({"seed": 1.5}, 400, "seed", None),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias", None),
    ({"logprobs": 21}, 400, "logprobs", None),
    ({"echo": True, "logprobs": 1}, 400, "echo", "unsupported_parameter"),
    ({"temperature": 2.1}, 400, "temperature", None),
    ({"seed": 2**64}, 400, "seed", None),
    ({"seed": -(2**63) - 1}, 400, "seed", None),
    ({"min_tokens": 4}, 400, "min_tokens", None),
    ({"stop_token_ids": [1000]}, 400, "stop_token_ids", None),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias.5", None),
    ({"logit_bias": {"1000": 1}}, 400, "logit_bias", None),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", None),
    ({"user": 3}, 400, "user", None),
    ({"response_format": "json"}, 400, "response_format", None),
    ({"response_format": {"type": "xml"}}, 400, "response_format.type", None),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema", None),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, 400, "structured_outputs", None),
    ({"structured_outputs": {}}, 400, "structured_outputs", None),
    ({"structured_outputs": {"regexp": "a"}}, 400, "structured_outputs.regexp", None),
    ({"structured_outputs": {"choice": [3]}}, 400, "structured_outputs.choice[0]", None),
    ({"guided_choice": []}, 400, "guided_choice", None),
    ({"guided_regex": 3}, 400, "guided_regex", None),
    ({"guided_regex": "a", "guided_json": {}}, 400, "guided_regex", None),
    ({"suffix": "x"}, 400, "suffix", "unsupported_parameter"),
    ({"best_of": 3}, 400, "best_of", "unsupported_parameter"),
    ({"model": "other"}, 404, "model", "model_not_found"),
]
BAD_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"tools": [{}]}, "tools"),
    ({"max_completion_tokens": 4}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"continue_final_message": True}, "continue_final_message"),
]


@pytest.mark.slow
async def test_bad_requests_name_the_parameter(route, fake):
    a = fake("a")
    async with route(a) as r:
        for change, status, param, code in BAD:
            got, body = await r.post("/v1/completions", {**ASK, **change})
            assert (got, body["error"]["param"], body["error"]["code"]) == (status, param, code)
            assert body["error"]["type"] == "invalid_request_error"
        for change, param in BAD_CHAT:
            got, body = await r.post("/v1/chat/completions", {**CHAT, **change})
            assert (got, body["error"]["param"]) == (400, param), body
        for data in (b"", b"{", b"[]", b"\xff"):
            async with r.http.post(r.server.url + "/v1/completions", data=data) as response:
                assert response.status == 400
                assert (await response.json())["error"]["type"] == "invalid_request_error"
    assert not a.named("start_generate")


async def test_harmless_values_and_unknown_fields_are_accepted(route, fake):
    async with route(fake("a")) as r:
        extras = {
            "echo": False, "suffix": None, "best_of": 1, "user": "me", "stop": None, "n": None,
            "logit_bias": None, "temperature": None, "something_new": {"a": 1},
        }  # fmt: skip
        assert (await r.post("/v1/completions", {**ASK, **extras}))[0] == 200
        extras = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}}
        assert (await r.post("/v1/chat/completions", {**CHAT, **extras}))[0] == 200


@pytest.mark.slow
async def test_errors_of_the_server_itself_are_error_objects(route, fake):
    async with route(fake("a"), max_body_mb=1) as r:
        status, body = await r.post("/v1/nothing", {})
        assert (status, body["error"]["type"]) == (404, "invalid_request_error")
        async with r.http.get(r.server.url + "/v1/completions") as response:
            assert response.status == 405
            assert (await response.json())["error"]["code"] == "method_not_allowed"
        status, body = await r.post("/v1/completions", {**ASK, "prompt": "w" * 2**20})
        assert (status, body["error"]["code"]) == (413, "too_large")


async def test_request_ids_and_traces_reach_the_engine(route, fake):
    a = fake("a")
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with route(a) as r:
        url = r.server.url + "/v1/completions"
        headers = {"X-Request-Id": "mine", "traceparent": trace}
        for stream in (False, True):
            body = {**ASK, "stream": stream}
            async with r.http.post(url, json=body, headers=headers) as response:
                await response.read()
                assert response.headers["X-Request-Id"] == "mine"
        async with r.http.post(url, json=ASK, headers={"X-Request-Id": "a b" * 99}) as response:
            assert len(response.headers["X-Request-Id"]) == 32
    assert a.headers[0]["x-request-id"] == "mine"
    assert a.headers[0]["traceparent"] == trace


async def test_keys(route, fake):
    async with route(fake("a"), api_key="k", admin_key="adm") as r:
        assert (await r.post("/v1/completions", ASK))[0] == 401
        bearer = {"Authorization": "Bearer k"}
        assert (await r.post("/v1/completions", ASK, headers=bearer))[0] == 200
        assert (await r.post("/admin/rollback", {}, headers=bearer))[0] == 401
        admin = {"Authorization": "Bearer adm"}
        assert (await r.post("/admin/rollback", {}, headers=admin))[0] == 409
        assert (await r.get("/health"))["status"] == "ok"


@pytest.mark.parametrize(
    "headers", [{"Origin": "http://evil.example"}, {"Host": "evil.example:8000"}]
)
async def test_requests_of_foreign_web_pages_are_not_loopback(route, fake, headers):
    async with route(fake("a")) as r:
        assert (await r.post("/admin/rollback", {}, headers=headers))[0] == 403
        assert (await r.post("/admin/rollback", {}))[0] == 409


async def test_the_small_endpoints(route, fake):
    async with route(fake("a")) as r:
        assert (await r.get("/v1/models"))["data"][0]["id"] == "fake"
        assert (await r.get("/health"))["engines"] == {"up": 1, "of": 1}
        assert "version" in await r.get("/version")
        _, body = await r.post("/tokenize", {"prompt": "w1 w2"})
        assert (body["tokens"], body["count"], body["max_model_len"]) == ([1, 2], 2, 256)
        _, body = await r.post("/tokenize", CHAT)
        assert body["tokens"] == [1, 2]
        _, body = await r.post("/detokenize", {"tokens": [1, 2]})
        assert body["prompt"] == "w1 w2"
        assert (await r.post("/detokenize", {"tokens": [1000]}))[0] == 400
        assert (await r.post("/tokenize", {}))[0] == 400
        await r.post("/v1/completions", ASK)
        async with r.http.get(r.server.url + "/metrics") as response:
            text = await response.text()
    name = "microserve_router"
    assert f'{name}_http_requests_total{{path="/v1/completions",status="200"}} 1.0' in text
    labels = 'generation="1",status="done",strategy="data_parallel"'
    assert f"{name}_requests_total{{{labels}}} 1.0" in text
    assert f"{name}_generated_tokens_total 3.0" in text
    assert f'{name}_engine_up{{engine="a"}} 1.0' in text
    assert f'{name}_breaker_state{{engine="a"}} 0.0' in text


async def test_long_prompts_are_read_off_the_event_loop(route, fake, monkeypatch):
    threads = []
    original = reading.load

    def load(body):
        threads.append(threading.current_thread())
        return original(body)

    monkeypatch.setattr(reading, "load", load)
    async with route(fake("a")) as r:
        await r.post("/v1/completions", ASK)
        await r.post("/v1/completions", {**ASK, "prompt": "w1 " * 5000})
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


async def test_admin_engines(route, fake):
    a, b = fake("a"), fake("b")
    async with route(a, b) as r:
        admin = r.server.url + "/admin/engines"
        async with r.http.patch(f"{admin}/a", json={"draining": True}) as response:
            assert response.status == 200
        for _ in range(3):
            assert (await r.post("/v1/completions", ASK))[0] == 200
        assert not a.named("start_generate")
        async with r.http.patch(f"{admin}/a", json={"draining": False, "role": "prefill"}) as _:
            pass
        async with r.http.delete(f"{admin}/b") as response:
            assert (await response.json())["removed"] == "b"
        assert (await r.post("/v1/completions", ASK))[0] == 200
        assert len(a.named("start_generate")) == 1
        for _ in range(2):  # the second time it is a heartbeat
            assert (await r.post("/admin/engines", {"url": b.url, "id": "b"}))[0] == 200
        await r.server.router.registry["b"].settled.wait()
        engines = {e["id"]: e for e in (await r.get("/admin/engines"))["engines"]}
        assert {id: (e["status"], e["role"]) for id, e in engines.items()} == {
            "a": ("up", "prefill"), "b": ("up", "any"),
        }  # fmt: skip
        async with r.http.delete(f"{admin}/nobody") as response:
            assert response.status == 404
        for url in ("ftp://x", "http://", "http://[", "engine"):
            assert (await r.post("/admin/engines", {"url": url}))[0] == 400
        assert (await r.post("/admin/engines", {"url": f"http://{'x' * 70}.example"}))[0] == 200
        assert (await r.post("/v1/completions", ASK))[0] == 200


async def test_an_engine_with_another_model_is_not_used(route, fake):
    a, b = fake("a"), fake("b")
    b.info = b.info.model_copy(update={"name": "another", "fingerprint": "g"})
    async with route(a, b) as r:
        assert {backend.status for backend in r.server.router.registry} == {"up", "down"}
        for _ in range(2):
            assert (await r.post("/v1/completions", {**ASK, "model": None}))[0] == 200
    assert not a.named("start_generate") or not b.named("start_generate")


@pytest.mark.slow
async def test_strategies_are_loaded_from_uploaded_source_if_allowed(route, fake):
    source = (
        '"""Mine."""\nfrom router import Cluster, Request, strategy\n\n'
        "@strategy\nasync def mine(request: Request, cluster: Cluster, *, times: int = 1):\n"
        '    """My own."""\n    engine = cluster.engines.least_loaded()\n'
        "    async for chunk in engine.start_generate(request):\n        yield chunk\n"
    )
    async with route(fake("a")) as r:
        assert (await r.post("/admin/strategies", {"name": "mine", "source": source}))[0] == 403
    async with route(fake("a"), allow_upload=True) as r:
        assert (await r.post("/admin/strategies", {"name": "mine", "source": source}))[0] == 201
        async with r.http.put(r.server.url + "/admin/strategy", json={"name": "mine"}) as response:
            assert (await response.json())["generation"] == 2
        assert (await r.post("/v1/completions", ASK))[0] == 200
        known = {s["name"]: s for s in (await r.get("/admin/strategies"))["strategies"]}
        assert known["mine"]["doc"] == "My own."
        assert known["mine"]["params"]["times"]["default"] == 1
        for name, bad in (("mine", "import nothing_here"), ("yours", source), ("x", "1/")):
            status, body = await r.post("/admin/strategies", {"name": name, "source": bad})
            assert (status, body["error"]["param"]) == (400, "source")
        for body in (
            {"name": "mine", "params": {"times": "many"}}, {"name": "mine", "params": {"x": 1}},
        ):  # fmt: skip
            async with r.http.put(r.server.url + "/admin/strategy", json=body) as response:
                assert response.status == 400
        async with r.http.put(r.server.url + "/admin/strategy", json={"name": "no"}) as response:
            assert response.status == 404
        assert (await r.get("/admin/strategies"))["active"]["name"] == "mine"
        status, body = await r.post("/admin/rollback", {})
        assert (status, body["name"], body["generation"]) == (200, "data_parallel", 3)
        assert body["canary"] is False


@pytest.mark.parametrize(
    "body",
    [
        rb'{"name": "balanced", "params": {"\ud800": 1}}',  # no text: half a surrogate pair
        b'{"name": "balanced", "params": {"ratio": NaN}}',
        b"[" * 100_000,
        b"\xff",
        b'{"name": %b}' % (b"1" * 5000),
    ],
    ids=["surrogate", "nan", "depth", "utf-8", "digits"],
)
async def test_the_admin_api_takes_the_same_json(route, fake, body):
    async with route(fake("a")) as r:
        model = await r.http.post(r.server.url + "/v1/completions", data=body)
        declared = {"Content-Type": "application/json"}
        response = await r.http.put(r.server.url + "/admin/strategy", data=body, headers=declared)
        error = (await response.json())["error"]
        assert error == (await model.json())["error"]
    assert (response.status, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith("the body is not JSON: ")

"""`/openapi.json` describes every route, its requests and its replies as they are."""

from __future__ import annotations

import asyncio
import re

import jsonschema_rs
import pytest
from openapi_fuzz import fuzz


@pytest.mark.processes
@pytest.mark.slow
async def test_schemathesis_finds_nothing(route_real):
    async with route_real() as r:
        calls = await asyncio.to_thread(fuzz, r.server.url, 4)
    assert calls > 40


@pytest.mark.processes
async def test_every_route_is_described(route_real):
    async with route_real() as r:
        document = await r.get("/openapi.json")
        paths = document["paths"]
        for path in (
            "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{id}", "/tokenize",
            "/detokenize", "/health", "/metrics", "/version", "/openapi.json", "/docs",
            "/admin/strategies", "/admin/strategy", "/admin/engines/{id}", "/admin/requests/{id}",
            "/admin/ledger",
        ):  # fmt: skip
            assert path in paths
        for path, operations in paths.items():
            for method, operation in operations.items():
                assert operation["summary"].endswith("."), (path, "has no docstring")
                assert operation["tags"], (path, "has no heading in /docs")
                if method in ("post", "put", "patch") and path != "/admin/rollback":
                    assert "requestBody" in operation, (method, path)


async def test_the_docs_page_needs_no_other_host(route, fake):
    async with route(fake("a"), api_key="k") as r:
        async with r.http.get(r.server.url + "/docs") as page:
            html = await page.text()
        assert "/openapi.json" in html
        assets = re.findall(r'(?:src|href)="([^"]+)"', html)
        assert len(assets) >= 3 and all(asset.startswith("/docs/") for asset in assets)
        async with asyncio.timeout(10):
            for asset in assets:
                async with r.http.get(r.server.url + asset) as response:
                    content = await response.read()
                    assert response.status == 200 and len(content) > 1000
                if asset.endswith(".css"):  # what a style sheet loads is in it
                    loaded = re.findall(rb"(?:url\(|@import)\s*[\"']?([^\"')]{1,20})", content)
                    assert all(one.startswith(b"data:") for one in loaded), loaded
        assert "://" not in html  # nor does the script that is in the page name another host


ACCEPTED = [
    {"prompt": "a"},
    {"prompt": [1, 2], "stop": "x", "n": None},
    {"prompt": ["a", [1]], "stop": ["x"], "logit_bias": {"3": -1}},
    {"prompt": "a", "response_format": {"type": "text"}, "seed": 2**64 - 1},
    {"prompt": "a", "structured_outputs": {"choice": ["a"]}, "something_else": 1},
]
REFUSED = [
    {},
    {"prompt": 3},
    {"prompt": ["a", 3]},
    {"prompt": ""},
    {"prompt": []},
    {"prompt": "a", "n": 0},
    {"prompt": "a", "temperature": "hot"},
    {"prompt": "a", "temperature": 2.5},
    {"prompt": "a", "stop": [""]},
    {"prompt": "a", "stop": ["a"] * 17},
    {"prompt": "a", "logit_bias": {"3": 200}},
    {"prompt": "a", "response_format": {"type": "yaml"}},
    {"prompt": "a", "response_format": {"type": "json_schema"}},
    {"prompt": "a", "structured_outputs": {"regex": ""}},
    {"prompt": "a", "structured_outputs": {"xml": "x"}},
    {"prompt": "a", "seed": 2**64},
    {"prompt": "a", "guided_choice": [1]},
]


@pytest.mark.processes
async def test_the_schema_and_the_router_agree(route_real):
    """Both are made from the same types: each accepts exactly what the other accepts."""
    async with route_real() as r:
        document = await r.get("/openapi.json")
        body = document["paths"]["/v1/completions"]["post"]["requestBody"]
        schema = body["content"]["application/json"]["schema"]
        validator = jsonschema_rs.validator_for({**schema, "components": document["components"]})
        for fields, status in [(one, 200) for one in ACCEPTED] + [(one, 400) for one in REFUSED]:
            got, answer = await r.post("/v1/completions", {"max_tokens": 1, **fields})
            assert got == status, (fields, answer)
            assert validator.is_valid(fields) == (status == 200), fields
            if status == 400:
                error = document["components"]["schemas"]["ErrorObject"]
                reply = {**error, "components": document["components"]}
                assert jsonschema_rs.validator_for(reply).is_valid(answer)


RICH = {"max_tokens": 6, "n": 2, "return_token_ids": True, "seed": 1}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": ["é", "b"], "logprobs": 2}),
        ("/v1/completions", {"prompt": "b", "stop": ["<"], "echo": True}),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", {"stop_token_ids": list(range(300))}),
    ],
)
async def test_whole_answers_are_as_described(route_real, path, fields):
    body = {**RICH, **fields}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": "hi"}]
    async with route_real() as r:
        document = await r.get("/openapi.json")
        reply = document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]
        schema = closed({**reply["schema"], "components": document["components"]})
        status, answer = await r.post(path, body)
        assert status == 200, answer
        jsonschema_rs.validator_for(schema).validate(answer)


def closed(schema):
    """Return `schema` with additional properties forbidden."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(part) for key, part in schema.items()}
    return {"additionalProperties": False, **inner} if "properties" in schema else inner

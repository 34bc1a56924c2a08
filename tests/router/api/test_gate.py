"""What the gate refuses before a handler runs: web pages of other sites, paths, bodies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from waiting import until

pytestmark = pytest.mark.slow  # all of them: each waits a little

ASK = json.dumps({"prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0}).encode()
JSON = "Content-Type: application/json"


def request(method: str, path: str, *headers: str, host: str = "localhost", body: bytes = b""):
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


@asynccontextmanager
async def connected(r) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    parts = urlsplit(r.server.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, str, Any]:
    """Return status, head and parsed body of the next answer."""
    async with asyncio.timeout(10):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].split()[0])
        body = await reader.readexactly(length)
    return int(head.split()[1]), head, json.loads(body) if body[:1] in b"{[" else body


async def ask(r, raw: bytes) -> tuple[int, str | None]:
    """Send a request; return the status and the error's code."""
    async with connected(r) as (reader, writer):
        writer.write(raw)
        status, _, body = await answer(reader)
        return status, body["error"]["code"] if status >= 400 and "error" in body else None


async def test_web_pages_of_other_sites_call_nothing_without_a_key(route, fake):
    async with route(fake("a")) as r:
        host = urlsplit(r.server.url).netloc
        for foreign in (
            "Origin: http://127.0.0.1:1",
            "Origin: http://localhost",
            "Origin: null",
            "Sec-Fetch-Site: cross-site",
            "Sec-Fetch-Site: same-site",
        ):
            for method, path, body in (
                ("POST", "/admin/rollback", b""),
                ("GET", "/admin/strategies", b""),
                ("PUT", "/admin/strategy", b"{}"),
                ("POST", "/v1/completions", ASK),
                ("POST", "/tokenize", b"{}"),
                ("DELETE", "/v1/models", b""),
            ):
                raw = request(method, path, foreign, JSON, host=host, body=body)
                assert await ask(r, raw) == (403, "cross_site"), (foreign, path)
            assert (await ask(r, request("GET", "/v1/models", foreign, host=host)))[0] == 200
        for own in (f"Origin: http://{host}", "Sec-Fetch-Site: same-origin", "X-A: b"):
            raw = request("POST", "/admin/rollback", own, host=host)
            assert await ask(r, raw) == (409, "conflict")
            raw = request(
                "POST", "/v1/completions", own, "Content-Type: text/plain", host=host, body=ASK
            )
            assert (await ask(r, raw))[0] == 200


async def test_with_keys_any_page_may_call(route, fake):
    """It has the key; Host and Origin tell nothing more."""
    async with route(fake("a"), api_key="k", admin_key="a") as r:
        foreign = ("Origin: http://ui.example", "Sec-Fetch-Site: cross-site")
        raw = request(
            "POST", "/v1/completions", *foreign, "Authorization: Bearer k", host="x.y", body=ASK
        )
        assert (await ask(r, raw))[0] == 200
        raw = request("POST", "/admin/rollback", *foreign, "Authorization: Bearer a", host="x.y")
        assert (await ask(r, raw))[0] == 409
        for path in ("/v1/completions", "/admin/rollback"):
            assert (await ask(r, request("POST", path, *foreign)))[0] == 401


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("key", ["", "a"])
async def test_bodies_of_the_admin_api_are_declared_as_json(route, fake, key, chunked):
    """Other types need no preflight, so pages of any site may send them."""
    async with route(fake("a"), admin_key=key) as r:
        for declared, wanted in (
            ("X-A: b", 415),
            ("Content-Type: text/plain", 415),
            ("Content-Type: application/x-www-form-urlencoded", 415),
            ("Content-Type: application/jsonp", 415),
            ("Content-Type: text/plain; application/json", 415),
            ("Content-Type: Application/JSON; charset=utf-8", 404),
            ("Content-Type: application/json ;charset=utf-8", 404),
        ):
            raw = request(
                "PUT", "/admin/strategy", declared, f"Authorization: Bearer {key}",
                body=b'{"name": "nobody"}',
            )  # fmt: skip
            if chunked:
                head, _, body = raw.partition(b"\r\n\r\n")
                head = head.replace(b"Content-Length: 18", b"Transfer-Encoding: chunked")
                raw = b"%b\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (head, len(body), body)
            status, code = await ask(r, raw)
            assert status == wanted, declared
            if wanted == 415:
                assert code == "unsupported_media_type"


async def test_only_allowed_hosts_without_a_key(route, fake):
    async with route(fake("a")) as r:
        for host in ("evil.example", "evil.example:80", "localhost.evil.example", "a@localhost"):
            for method, path, body in (
                ("GET", "/v1/models", b""), ("POST", "/v1/completions", ASK),
                ("GET", "/nowhere", b""),
            ):  # fmt: skip
                refused = await ask(r, request(method, path, host=host, body=body))
                assert refused == (403, "host_not_allowed"), host
            assert (await ask(r, request("GET", "/admin/strategies", host=host)))[0] == 403
            for path in ("/health", "/metrics", "/version", "/openapi.json", "/docs"):
                assert (await ask(r, request("GET", path, host=host)))[0] == 200
        for host in ("127.0.0.1", "localhost:1", "[::1]:2", "10.2.3.4"):
            assert (await ask(r, request("GET", "/v1/models", host=host)))[0] == 200
        assert (await ask(r, request("GET", "/admin/strategies", host="10.2.3.4")))[0] == 403


@pytest.mark.parametrize("keys", [{}, {"api_key": "k", "admin_key": "k"}])
async def test_listed_hosts_hold_with_and_without_keys(route, fake, keys):
    async with route(fake("a"), allowed_hosts="box.lan", **keys) as r:
        bearer = "Authorization: Bearer k"
        for path in ("/v1/models", "/admin/strategies"):
            for host, wanted in (("box.lan:80", 200), ("localhost", 200), ("evil.example", 403)):
                assert (await ask(r, request("GET", path, bearer, host=host)))[0] == wanted


async def test_every_other_spelling_of_an_open_path_needs_the_key(route, fake):
    async with route(fake("a"), api_key="k") as r:
        for path in (
            "//health", "/health/", "/HEALTH", "/./health", "/v1/../health", "/health%00",
            "/health%2F", "/health;x", "/docsx", "//docs/", "/v1/models/../../docs/",
            "/openapi.json/", "/admin", "/%2Fhealth", "/v1/models?/health", "/v1/models%3F/health",
        ):  # fmt: skip
            assert await ask(r, request("GET", path)) == (401, "invalid_api_key"), path
        for path in ("/health", "/%68ealth", "/health?x", "http://x/health"):
            assert (await ask(r, request("GET", path)))[0] == 200, path
        # Below /docs are files only.
        for path in (
            "/docs/../v1/models", "/docs/%2e%2e/v1/models", "/docs/..%2Fv1/models", "/docs//",
            "/docs/../../router/py.typed", "/docs/%2e%2e/%2e%2e/__init__.py", "/docs/%00",
            "/docs//etc/passwd", "/docs/../admin/engines",
        ):  # fmt: skip
            assert (await ask(r, request("GET", path)))[0] == 404, path
        for host in ("x/health?", "x/health#", "localhost/health"):
            assert (await ask(r, request("GET", "/v1/models", host=host)))[0] == 401, host


@pytest.mark.parametrize("path", ["/health", "/docs/x", "/v1/completions", "/admin/engines"])
async def test_without_a_key_no_long_body_is_read(route, fake, path):
    async with route(fake("a"), api_key="k", admin_key="a") as r, connected(r) as (reader, writer):
        whole = request("POST", path, JSON, body=b" " * 2**23)
        writer.write(whole[: -(2**22)])
        status, head, _ = await answer(reader)
        assert status == (413 if path in ("/health", "/docs/x") else 401)
        assert "connection: close" in head


async def test_bodies_beyond_the_budget_are_a_503(route, fake):
    async with route(fake("a"), max_body_mb=1, max_bodies_mb=1) as r:
        part = request("POST", "/v1/completions", body=ASK + b" " * (700 * 1024))
        async with connected(r) as (first, to_first), connected(r) as (second, to_second):
            to_first.write(part[:-1])
            to_second.write(part[:-1])
            received = asyncio.ensure_future(answer(second)), asyncio.ensure_future(answer(first))
            done, pending = await asyncio.wait(received, return_when=asyncio.FIRST_COMPLETED)
            (refused,), (waiting,) = done, pending
            status, head, body = refused.result()
            assert (status, body["error"]["code"]) == (503, "overloaded")
            assert "retry-after: 1\r\n" in head and "connection: close" in head
            (to_first if waiting is received[1] else to_second).write(part[-1:])
            assert (await waiting)[0] == 200
        assert (await ask(r, part))[0] == 200


async def test_a_request_that_runs_holds_nothing_of_the_budget(route, fake):
    a = fake("a")
    a.gate = asyncio.Event()
    async with route(a, max_body_mb=1, max_bodies_mb=1) as r:
        raw = request("POST", "/v1/completions", body=ASK + b" " * (900 * 1024))
        running = [asyncio.ensure_future(ask(r, raw))]
        await until(lambda: a.running == 1)
        running.append(asyncio.ensure_future(ask(r, raw)))
        await until(lambda: a.running == 2)
        a.gate.set()
        assert await asyncio.gather(*running) == [(200, None), (200, None)]

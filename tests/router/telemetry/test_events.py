"""Events and the audit log, from a real router."""

from __future__ import annotations

import asyncio
import json
import stat

import aiohttp
import pytest
from waiting import until

from router.rollout.audit_log import AuditLog
from router.telemetry.events import Events

ASK = {"prompt": [1, 2, 3], "max_tokens": 3, "temperature": 0}


class Listening:
    """A listener to `/admin/events`."""

    def __init__(self, response) -> None:
        self._content = response.content

    async def next(self) -> tuple[str, dict]:
        fields = {}
        async with asyncio.timeout(10):
            while line := (await self._content.readline()).decode().strip():
                name, _, value = line.partition(": ")
                fields[name] = value
        if "event" not in fields:
            return await self.next()  # skip a comment
        return fields["event"], json.loads(fields["data"])


async def test_events_report_swaps_requests_and_engines(route, fake):
    a = fake("a")
    async with route(a) as r, r.http.get(r.server.url + "/admin/events") as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        listening = Listening(response)
        await response.content.readline()  # the listener is ready
        await r.post("/v1/completions", ASK, headers={"X-Request-Id": "x"})
        kind, begun = await listening.next()
        assert (kind, begun["id"], begun["prompt_tokens"]) == ("request_begun", "x", 3)
        kind, ended = await listening.next()
        assert (kind, ended["status"], ended["completion_tokens"]) == ("request_ended", "done", 3)
        assert ended["first_token_ms"] <= ended["ms"]
        async with r.http.put(
            r.server.url + "/admin/strategy", json={"name": "balanced", "params": {"ratio": 0.5}}
        ) as swapped:
            assert swapped.status == 200
        kind, swap = await listening.next()
        assert (kind, swap["generation"], swap["name"]) == ("swap", 2, "balanced")
        assert (swap["who"], swap["params"]) == ("127.0.0.1", {"ratio": 0.5})
        await r.post("/admin/engines", {"url": "http://127.0.0.1:9", "id": "nobody"})
        kind, engine = await listening.next()
        assert (kind, engine["id"], engine["status"]) == ("engine", "nobody", "down")


async def test_a_slow_listener_is_cut_off():
    events, cut = Events(limit=3), []
    with events.listening(lambda: cut.append(True)) as slow:
        with events.listening(lambda: cut.append(False)) as quick:
            frames = quick.frames(10)
            for number in range(4):
                events.publish("swap", number=number)
                assert b"swap" in await anext(frames)
            assert cut == [True]
        events.publish("swap", number=9)
        assert [frame async for frame in slow.frames(10)] == []


async def test_there_are_only_so_many_listeners(route, fake, monkeypatch):
    monkeypatch.setattr("router.telemetry.events.MOST_LISTENERS", 2)
    async with route(fake("a")) as r, r.http.get(r.server.url + "/admin/events") as first:
        await first.content.readline()
        async with r.http.get(r.server.url + "/admin/events") as second:
            await second.content.readline()
            async with r.http.get(r.server.url + "/admin/events") as third:
                assert third.status == 503 and third.headers["Retry-After"] == "1"
                assert (await third.json())["error"]["type"] == "overloaded"
            second.close()
        await until(lambda: len(r.server.router.events._listeners) == 1)
        async with r.http.get(r.server.url + "/admin/events") as another:
            assert another.status == 200


async def test_shutdown_ends_the_listeners(route, fake):
    """Shutdown waits for requests but not for listeners."""
    async with aiohttp.ClientSession() as http, asyncio.timeout(10):
        async with route(fake("a"), shutdown_s=60) as r:
            response = await http.get(r.server.url + "/admin/events")
            await response.content.readline()
        assert b"event" not in await response.content.read()


async def test_idle_listeners_get_empty_frames():
    with Events().listening(lambda: None) as listener:
        assert await anext(listener.frames(0.01)) == b""


async def test_the_audit_log_is_private_and_only_grows(route, fake, tmp_path):
    file = tmp_path / "audit.jsonl"
    file.write_text('{"what": "before"}\n')
    file.chmod(0o644)
    keys = {"admin_key": "adm", "audit_log": str(file)}
    async with route(fake("a"), **keys) as r:
        body = {"name": "balanced", "params": {"ratio": 0.25}}
        bearer = {"Authorization": "Bearer adm"}
        async with r.http.put(
            r.server.url + "/admin/strategy", json=body, headers=bearer
        ) as response:
            assert response.status == 200
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before, started, activated = map(json.loads, file.read_text().splitlines())
    assert before == {"what": "before"}
    assert (started["who"], started["generation"]) == ("router", 1)
    digest = activated.pop("source_sha256")
    assert len(digest) == 64
    assert activated.pop("at") >= started["at"]
    assert activated == {
        "who": "admin_key", "what": "activate", "name": "balanced", "params": {"ratio": 0.25},
        "generation": 2,
    }  # fmt: skip
    with pytest.raises(OSError, match="No such file"):
        AuditLog(str(tmp_path / "absent" / "audit.jsonl"))

"""`GET /admin/trace` and `microserve trace`: the latest seconds of a fleet as a time line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest
from chrome_trace_rules import TraceFile, read_trace
from click.testing import CliRunner
from engine_process import EngineProcess
from router_process import RouterProcess, until

from router.cli import cli


async def trace_of(r, query: str = "") -> TraceFile:
    async with r.http.get(r.server.url + "/admin/trace" + query) as response:
        assert response.status == 200, await response.text()
        assert "attachment" in response.headers["Content-Disposition"]
        return read_trace(await response.read())


async def test_engines_without_a_time_line_have_calls_and_say_why(route, fake):
    """Scripted engines have no such path, as engines of earlier versions."""
    gate = asyncio.Event()
    async with route(fake("<b>a</b>"), fake("b", gate=gate)) as r:
        empty = await trace_of(r)
        assert empty.slices == [] and len(empty.processes) == 3
        for _ in range(3):
            asking = asyncio.create_task(
                r.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 2})
            )
            await asyncio.wait([asking], timeout=0.3)
        file = await trace_of(r, "?seconds=30")
        assert file.about["requests"] == 3 and file.about["requests_left_out"] == 0
        assert all(one["problem"] for one in file.about["engines"].values())
        calls = [one for one in file.slices if one["name"] == "start_generate"]
        running = [one for one in file.slices if one["args"].get("status") == "running"]
        assert len(calls) == 3 and 1 <= len(running) < 3
        assert len(file.flows) == 3
        gate.set()
        await asking


async def test_its_key_its_bounds_and_one_at_a_time(route, fake, monkeypatch):
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def asks_long(*_, **__):
        asked.set()
        await go_on.wait()
        return []

    async with route(fake("a"), admin_key="k") as r:
        url, headers = r.server.url + "/admin/trace", {"Authorization": "Bearer k"}
        async with r.http.get(url) as response:
            assert response.status == 401
        for bad in ("seconds=0", "seconds=601", "seconds=nan", "seconds=x"):
            async with r.http.get(f"{url}?{bad}", headers=headers) as response:
                assert response.status == 400, bad

        async def status() -> int:
            async with r.http.get(url, headers=headers) as response:
                await response.read()
                return response.status

        monkeypatch.setattr(import_module("router.api.admin.trace"), "ask_engines", asks_long)
        first = asyncio.create_task(status())
        await asked.wait()
        assert await status() == 409
        go_on.set()
        assert await first == 200 and await status() == 200


async def test_the_command_saves_a_time_line(route, fake, tmp_path: Path):
    file = tmp_path / "trace.json"
    file.write_text("old")
    async with route(fake("a"), admin_key="k") as r:
        await r.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 2})

        def save(*more: str) -> tuple[int, str]:
            command = ["trace", "--url", r.server.url, "-o", str(file), *more]
            done = CliRunner().invoke(cli, command)
            return done.exit_code, done.output

        code, said = await asyncio.to_thread(save)
        assert code == 1 and "needs its key" in said and file.read_text() == "old"
        code, said = await asyncio.to_thread(save, "--admin-key", "k", "--seconds", "5")
        told = json.loads(said)
        assert code == 0 and told == {"trace": str(file), "bytes": file.stat().st_size}
    assert read_trace(file).about["seconds"] == 5
    assert [path.name for path in await asyncio.to_thread(lambda: [*tmp_path.iterdir()])] == [
        "trace.json"
    ]


# Real engines and a real router


@pytest.fixture(scope="module")
def deployment() -> Iterator[RouterProcess]:
    flags = ("--dtype", "float32")
    running = [
        EngineProcess(*flags, "--role", role, "--engine-id", role, secret="ab" * 32)
        for role in ("prefill", "decode")
    ]
    router = RouterProcess([one.url for one in running], "prefill_decode")
    try:
        until(lambda: router.http.get("/health").json()["engines"]["up"] == 2)
        yield router
    finally:
        router.kill()
        for one in running:
            one.kill()


@pytest.mark.processes
@pytest.mark.slow
def test_real_engines_tell_their_steps_and_puts_in_the_routers_time(deployment: RouterProcess):
    prompts = [[(n * k) % 250 for n in range(1, 400)] for k in (3, 7, 11, 13)]
    with ThreadPoolExecutor(4) as pool:
        for reply in pool.map(lambda one: deployment.ask(one, 8), prompts):
            assert reply.status_code == 200, reply.text
    file = read_trace(deployment.http.get("/admin/trace?seconds=60").content)
    engines = file.about["engines"]
    assert set(engines) == {"prefill", "decode"}
    assert not any("problem" in one for one in engines.values()), engines
    error_us = {name: one["clock_error_ms"] * 1e3 for name, one in engines.items()}
    assert all(0 < error < 1e6 for error in error_us.values()), engines
    sends = {
        one["args"]["request"]: one
        for one in file.of("prefill (prefill)", "calls")
        if one["name"] == "remote_send"
    }
    puts = {one["args"]["request"]: one for one in file.of("prefill (prefill)", "puts")}
    assert len(sends) == len(puts) == len(file.flows) == 4
    slack = error_us["prefill"] + 1
    for request, send in sends.items():
        put = puts[request]
        assert put["name"] == "put to decode" and put["args"]["bytes"] == send["args"]["bytes"]
        # What the engine did for a call lies within the call, but for the error of the clocks.
        assert put["ts"] >= send["ts"] - slack
        assert put["ts"] + put["dur"] <= send["ts"] + send["dur"] + slack
        steps = [
            one
            for one in file.of("prefill (prefill)", "steps")
            if request in one["args"].get("requests", ())
        ]
        assert sum(one["args"]["prompt_tokens"] for one in steps) >= send["args"]["computed_tokens"]
        for step in steps:
            assert send["ts"] - slack <= step["ts"] <= send["ts"] + send["dur"] + slack
    decodes = file.of("decode (decode)", "steps")
    assert sum(one["args"]["decodes"] for one in decodes) >= 4 * 7
    for number in file.flows:
        joined = file.joined(number)
        assert joined[0]["name"] in ("queue", "prefill") or joined[0]["name"].startswith("request")
        names = {one["name"].split()[0] for one in joined[1:]}
        assert {"prep_recv", "remote_send", "start_generate", "prefill", "put"} <= names
        assert {file.processes[one["pid"]] for one in joined} == set(file.processes.values())

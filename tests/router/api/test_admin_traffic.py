"""`GET /admin/traffic` and `microserve traffic`: what the router has recorded, as a trace."""

from __future__ import annotations

import asyncio
import json
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner
from raw_server import HEAD, RawServer

from router.cli import cli
from router.workload import WorkloadConfig, open_workload

SECRET = "w500 w501 w502"


async def lines(r, query: str = "") -> list[dict]:
    async with r.http.get(r.server.url + "/admin/traffic" + query) as response:
        assert response.status == 200
        return [json.loads(line) for line in (await response.text()).splitlines()]


async def test_requests_are_recorded_without_their_text(route, fake):
    async with route(fake("a")) as r:
        assert await lines(r) == []
        headers = {"X-Session-ID": "secret-session"}
        await r.post(
            "/v1/completions", {"prompt": SECRET + " w1" * 20, "max_tokens": 3}, headers=headers
        )
        await r.post("/v1/completions", {"prompt": [[1, 2], [3]], "n": 2, "max_tokens": 2})
        await r.events("/v1/completions", {"prompt": [5] * 16, "max_tokens": 4})
        found = await lines(r)
        async with r.http.get(r.server.url + "/admin/traffic") as response:
            text = await response.text()
        assert [(one["input_tokens"], one["output_tokens"]) for one in found] == [
            (23, 3), (2, 2), (2, 2), (1, 2), (1, 2), (16, 4),
        ]  # fmt: skip
        assert [len(one["pages"]) for one in found] == [1, 0, 0, 0, 0, 1]
        assert "secret" not in text and "w50" not in text and "500" not in found[0]["pages"]
        assert len(await lines(r, "?minutes=5")) == 6
        for bad in ("minutes=0", "minutes=nan", "minutes=x", "minutes=1e9"):
            async with r.http.get(r.server.url + f"/admin/traffic?{bad}") as response:
                assert response.status == 400, bad


async def test_a_client_that_leaves_is_recorded_with_what_it_got(route, fake):
    a = fake("a", gate=asyncio.Event())
    async with route(a) as r:
        body = {"prompt": [1, 2, 3], "max_tokens": 5, "stream": True}
        async with r.http.post(r.server.url + "/v1/completions", json=body) as response:
            await response.content.readany()
            response.close()
        await r.settled()
        (one,) = await lines(r)
        assert (one["input_tokens"], one["output_tokens"]) == (3, 1)


async def test_refused_requests_are_not_recorded(route, fake):
    async with route(fake("a")) as r:
        status, _ = await r.post("/v1/completions", {"prompt": [1], "max_tokens": 10**6})
        assert status == 400 and await lines(r) == []


async def test_it_can_be_switched_off(route, fake):
    async with route(fake("a"), traffic_minutes=0.0) as r:
        await r.post("/v1/completions", {"prompt": [1], "max_tokens": 1})
        async with r.http.get(r.server.url + "/admin/traffic") as response:
            assert response.status == 400
            assert "--traffic-minutes is 0" in (await response.json())["error"]["message"]


async def test_the_command_saves_a_trace(route, fake, tmp_path: Path):
    file = tmp_path / "traffic.jsonl"
    async with route(fake("a"), admin_key="k") as r:

        def save(*more: str) -> tuple[int, str]:
            command = ["traffic", "--url", r.server.url, "-o", str(file), *more]
            done = CliRunner().invoke(cli, command)
            return done.exit_code, done.output

        code, said = await asyncio.to_thread(save)
        assert code == 1 and "needs its key" in said and not file.exists()
        code, said = await asyncio.to_thread(save, "--admin-key", "k")
        assert code == 1 and "no request has ended" in said and not file.exists()
        for _ in range(3):
            await r.post("/v1/completions", {"prompt": [7] * 20, "max_tokens": 2})
        code, said = await asyncio.to_thread(save, "--admin-key", "k")
        assert code == 0 and json.loads(said) == {"traffic": str(file), "requests": 3}
    assert open_workload(WorkloadConfig(name=str(file))).count == 3


@pytest.mark.parametrize("flags", [("-o", "/no/such/folder/x"), ()])
def test_a_bad_command_line_is_refused(flags: tuple[str, ...]):
    done = CliRunner().invoke(cli, ["traffic", *flags])
    assert done.exit_code == 2 and "Error" in done.output


@pytest.mark.parametrize(
    ("answer", "again", "said"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}\n", None, "peer closed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", None, "no request has ended yet"),
        (HEAD, b"1000\r\n" + b"{}\n\n" * 1024 + b"\r\n", "sends more than 65536 bytes"),
    ],
)
async def test_a_file_is_replaced_only_by_a_whole_recording(
    tmp_path, monkeypatch, answer, again, said
):
    monkeypatch.setattr(import_module("router.cli.saved.download"), "MOST_BYTES", 1 << 16)
    file = tmp_path / "traffic.jsonl"
    file.write_text("mine\n")
    async with RawServer(answer, again).serving() as server:
        command = ["traffic", "--url", server.url, "-o", str(file)]
        done = await asyncio.to_thread(CliRunner().invoke, cli, command)
    assert done.exit_code == 1 and said in done.stderr
    assert file.read_text() == "mine\n" and list(tmp_path.iterdir()) == [file]

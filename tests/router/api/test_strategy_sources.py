"""The admin API's sources of strategies: shown, and checked without being loaded."""

from __future__ import annotations

import asyncio
import sys

import pytest

from router.dry_run.dry_run_process import Problem, Where

HEAD = "from router import strategy\n\n"
MINE = (
    HEAD
    + "@strategy\nasync def mine(request, cluster, *, times: int = 1):\n"
    + '    """My own."""\n    engine = cluster.engines.least_loaded()\n'
    + "    async for chunk in engine.start_generate(request):\n        yield chunk\n"
)


async def check(r, source, **more):
    return await r.post("/admin/strategies/check", {"source": source, **more})


async def test_the_source_of_an_installed_strategy_is_shown(route, fake):
    async with route(fake("a")) as r:
        shown = await r.get("/admin/strategies/cache_aware")
        assert "async def cache_aware" in shown["source"] and shown["installed"]
        assert shown["params"]["load_weight"]["default"] == 0.5
        assert shown["generations"] == []
        active = await r.get("/admin/strategies/data_parallel?generation=1")
        assert [one["generation"] for one in active["generations"]] == [1]
        for path in ("nothing", "%3Cscript%3E", "cache_aware?generation=1", "mine?generation=9"):
            async with r.http.get(f"{r.server.url}/admin/strategies/{path}") as response:
                assert response.status == 404, path
        async with r.http.get(f"{r.server.url}/admin/strategies/x?generation=y") as response:
            assert response.status == 400


async def test_the_source_of_what_runs_is_shown_after_a_newer_version_was_loaded(route, fake):
    async with route(fake("a")) as r:
        catalog = r.server.router.catalog
        r.use(catalog.load(MINE, file="mine.py"))
        catalog.load(MINE + "# newer\n", file="mine.py")
        newest = await r.get("/admin/strategies/mine")
        assert newest["source"] == MINE + "# newer\n" and not newest["installed"]
        assert newest["generations"] == []
        runs = await r.get("/admin/strategies/mine?generation=2")
        assert runs["source"] == MINE
        assert runs["source_sha256"] != newest["source_sha256"]
        assert [one["generation"] for one in runs["generations"]] == [2]


async def test_sources_are_checked_only_where_they_may_be_loaded(route, fake):
    async with route(fake("a")) as r:
        status, body = await check(r, MINE)
        assert (status, body["error"]["type"]) == (403, "permission_error")


@pytest.mark.slow
@pytest.mark.processes
async def test_a_good_source_is_described_and_not_loaded(route, fake):
    async with route(fake("a"), allow_upload=True) as r:
        before = [name for name in sys.modules if name.startswith("microserve_strategy")]
        status, told = await check(r, MINE)
        assert (status, told["ok"], told["problems"], told["name"]) == (200, True, [], "mine")
        assert told["doc"] == "My own." and told["params"]["times"]["type"] == "integer"
        assert told["requests"] > 100
        known = (await r.get("/admin/strategies"))["strategies"]
        assert "mine" not in [one["name"] for one in known]
        assert before == [name for name in sys.modules if name.startswith("microserve_strategy")]
        entries = (await r.get("/admin/audit"))["entries"]
        assert [one["what"] for one in entries] == ["started"]


RAISES = MINE.replace("    engine =", "    äö = {}['key'] or\\\n        1\n    engine =")
BAD = [
    ("def f(:\n", {}, "syntax", (1, 7), "invalid syntax"),
    ("x = 'é' + (1\n", {}, "syntax", (1, 11), "was never closed"),
    (HEAD + "é = 1/0\n", {}, "load", (3, 5), "ZeroDivisionError"),
    ("x = 1\n", {}, "load", (None, None), "it has: none"),
    (HEAD + "@strategy\ndef f(r, c): pass\n", {}, "load", (3, 2), "async function"),
    (MINE.replace("mine", "balanced"), {}, "load", (None, None), "name of an installed"),
    (MINE, {"params": {"times": "x"}}, "params", (None, None), "times='x'"),
    (RAISES, {}, "rule", (6, None), "KeyError: 'key'"),
    (MINE + "        return\n", {}, "rule", (None, None), "ended before the stream"),
    ("import os\nos._exit(3)\n", {}, "ended", (None, None), "ended its process (3)"),
]


@pytest.mark.slow
@pytest.mark.processes
async def test_what_is_wrong_is_said_with_its_place(route, fake):
    async with route(fake("a"), allow_upload=True) as r:
        for source, more, kind, place, says in BAD:
            status, told = await check(r, source, **more)
            (problem,) = told["problems"]
            assert (status, told["ok"], problem["kind"]) == (200, False, kind), told
            assert (problem["line"], problem["column"]) == place, told
            assert says in problem["message"]
        assert (await r.get("/admin/strategies"))["active"]["name"] == "data_parallel"


FORGED = """
import router.dry_run.worker as worker
worker.asdict = lambda place: {PLACE}
1/0
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "place",
    [
        "{'line': '<b>'}",
        *(pytest.param(one, marks=pytest.mark.thorough)
          for one in ("{'line': -1}", "{'x': 1}", "[1]", "1e999")),
    ],
)  # fmt: skip
async def test_a_place_that_a_strategy_made_up_is_refused(route, fake, place):
    async with route(fake("a"), allow_upload=True) as r:
        _, told = await check(r, FORGED.replace("{PLACE}", place))
        (problem,) = told["problems"]
        assert problem["kind"] == "ended" and problem["line"] is None


async def test_a_bounded_number_of_checks_wait(route, fake, monkeypatch):
    gate = asyncio.Event()

    async def waits(*_, **__):
        await gate.wait()
        return Problem("bad_request", "no", "source", "load", Where())

    monkeypatch.setattr("router.api.admin.sources.check_source", waits)
    async with route(fake("a"), allow_upload=True) as r:
        asked = [asyncio.create_task(check(r, MINE)) for _ in range(7)]
        done, _ = await asyncio.wait(asked, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        assert {one.result()[0] for one in done} == {409}
        gate.set()
        statuses = [status for status, _ in await asyncio.gather(*asked)]
        assert sorted(statuses) == [200] * 4 + [409] * 3
        assert (await check(r, MINE))[0] == 200

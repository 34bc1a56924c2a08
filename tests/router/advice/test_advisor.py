"""`POST /admin/advise`: one question from its recorded traffic to the ranking, and its limits."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import re
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from waiting import until

from engine.latency import FixedLatency, find_profile, profile_fields
from engine.protocol import EngineStatistics
from router.advice import advisor, engine_facts

pytestmark = [pytest.mark.processes, pytest.mark.slow]

# The fake engines tell no statistics: 20 ms a step and 4 prompt tokens a ms.
PROFILE = profile_fields(find_profile("llama-3.1-8b@a100")) | {
    "step": {"kind": "fixed", "step_ms": 20.0, "prompt_tokens_per_ms": 4.0}
}
ASK = {"profile": PROFILE, "seeds": 2, "candidates": [{"name": "cache_aware"}]}
MINE = """
from router import strategy

@strategy
async def {name}(request, cluster):
    engine = cluster.engines.least_loaded()
{body}
"""


def mine(*lines: str, name: str = "mine") -> dict[str, str]:
    body = "\n".join(f"    {line}" for line in lines)
    return {"source": MINE.format(body=body, name=name), "file": f"{name}.py"}


GENERATE = ("async for chunk in engine.start_generate(request, begin=0):", "    yield chunk")


async def serve(r: Any, requests: int = 24, tokens: int = 100) -> None:
    for number in range(requests):
        body = {"prompt": [number % 500] * tokens, "max_tokens": 3}
        status, _ = await r.post("/v1/completions", body)
        assert status == 200


def record(r: Any, requests: int = 24) -> None:
    """Record requests as if they had come a second after each other, until now."""
    for number in range(requests):
        at = time.monotonic() - requests + number
        prompt = [number % 500] * 100
        r.server.router.traffic.add(at, [prompt], [3], None, "data_parallel")


async def upload(r: Any, *lines: str, name: str = "mine") -> None:
    """Load a strategy without a dry run, which would refuse the bad ones."""
    loaded = mine(*lines, name=name)
    r.server.router.catalog.load(loaded["source"], file=loaded["file"])


def row(advice: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the row of a strategy, which it may share with others that do the same here."""
    return next(
        row
        for row in advice["ranking"]
        if name in (row["name"], *(one["name"] for one in row["alike"]))
    )


async def test_a_ranking_from_recorded_traffic(route, fake):
    async with route(fake("a", total_pages=512), fake("b", total_pages=512)) as r:
        record(r)
        asked = {**ASK, "candidates": ["prefill_decode", {"name": "cache_aware"}]}
        status, advice = await r.post("/admin/advise", asked)
        assert status == 200, advice
        assert advice["traffic"]["requests"] == 24 and advice["objective"] == "mean JCT"
        assert {one["steps"] for one in advice["engines"]} == {"those of the given profile"}
        alike = [one["title"] for row in advice["ranking"] for one in row["alike"]]
        assert "cache_aware" in alike  # nothing is shared, so it does as what runs now
        titles = {*alike, *(one["title"] for one in advice["ranking"])}
        assert titles == {
            "data_parallel", "cache_aware", "prefill_decode",
            "prefill_decode (1P1D)",
        }  # fmt: skip
        now = row(advice, "data_parallel")
        # One request at a time: 100 tokens take 45 ms, two more tokens 20 ms each.
        assert now["current"] and now["gain"] == 0.0 and now["completed"] == 24
        assert 84 < now["jct_ms"] < 100 and 44 < now["ttft_ms"] < 56
        # Nothing is changed by asking.
        assert r.server.router.revisions.active.number == advice["generation"] == 1
        assert r.server.router.revisions.candidate is None
        _, again = await r.post("/admin/advise", {**ASK, "candidates": []})
        assert row(again, "data_parallel") == {**now, "alike": []}  # to the bit


async def test_progress_is_told_and_the_answer_is_the_last_event(route, fake):
    """An objective makes it a question of goodput."""
    async with route(fake("a", total_pages=512)) as r:
        await serve(r)
        async with r.http.post(
            r.server.url + "/admin/advise", json={**ASK, "slo_ttft_ms": 10, "stream": True}
        ) as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            events = [
                json.loads(line.removeprefix("data: "))
                for line in (await response.text()).splitlines()
                if line
            ]
    assert [event["progress"]["done"] for event in events[:-1]] == [0, 1]
    advice = events[-1]["advice"]
    assert events[0]["progress"]["total"] == 2
    assert advice["objective"] == "goodput" and advice["keep"]
    assert row(advice, "data_parallel")["attained"] == 0.0


BAD = {
    "raises": (("raise ValueError('broken on purpose')", "yield"), "broken on purpose"),
    "spins": (("while True: pass", "yield"), "held up the event loop|CPU time"),
    "polls": (
        ("import asyncio", "while True: await asyncio.sleep(0)", "yield"), "without ever waiting",
    ),
    "hoards": (("held = bytearray(6 << 30)", *GENERATE), "MemoryError"),
    "exits": (("import os; os._exit(3)", "yield"), r"ended its process \(3\)"),
    "returns": (("return", "yield"), "returns ended before the stream did"),
}  # fmt: skip


async def test_a_bad_strategy_is_a_line_of_its_own(route, fake, monkeypatch):
    monkeypatch.setattr(advisor, "CPU_S", 30.0)
    async with route(fake("a", total_pages=512), grace_s=0.5) as r:
        record(r)
        for name, (lines, _) in BAD.items():
            await upload(r, *lines, name=name)
        asked = {**ASK, "candidates": [*({"name": name} for name in BAD), {"name": "cache_aware"}]}
        status, advice = await r.post("/admin/advise", asked)
        assert status == 200
        for name, (_, failure) in BAD.items():
            bad = row(advice, name)
            assert bad["failed"] is not None and bad["gain"] is None
            assert re.search(failure, bad["failed"]), bad["failed"]
            assert len(bad["failed"]) < 2100
        assert row(advice, "cache_aware")["failed"] is None
        assert {one["name"] for one in advice["ranking"][-len(BAD) :]} == set(BAD)


def titles(advice: dict[str, Any]) -> list[str]:
    """Return the titles of all rows, and of those that did the same as another one."""
    ranking = advice["ranking"]
    return sorted(
        title
        for one in ranking
        for title in (one["title"], *(other["title"] for other in one["alike"]))
    )


async def test_a_loaded_strategy_is_compared_from_its_source(route, fake):
    async with route(fake("a", total_pages=512), fake("b", total_pages=512)) as r:
        record(r)
        await upload(r, *GENERATE)
        _, advice = await r.post("/admin/advise", {**ASK, "candidates": [{"name": "mine"}]})
        ranking = advice["ranking"]
        assert not any(one["failed"] for one in ranking)
        assert sum(1 + len(one["alike"]) for one in ranking) == 3  # with other roles too
        r.use(r.server.router.catalog["mine"])
        await upload(r, *GENERATE, "return")
        _, advice = await r.post("/admin/advise", {**ASK, "candidates": []})
        assert [one["name"] for one in advice["ranking"]] == ["mine"]
        assert not advice["ranking"][0]["failed"]  # the active version runs, not the loaded one
        wanted = {**ASK, "candidates": [{"name": "mine"}], "keep_roles": True}
        _, advice = await r.post("/admin/advise", wanted)
        assert titles(advice) == ["mine", "mine [loaded later]"]


async def test_a_source_is_compared_without_being_loaded(route, fake):
    source = mine(*GENERATE, "return")["source"]
    wanted = [
        {"name": "mine", "source": source},
        {"name": "mine", "source": source, "params": {"x": 1}},
        {"name": "broken", "source": MINE.format(name="broken", body="    1 / 0\n    yield")},
        {"name": "cache_aware", "source": mine(*GENERATE, name="cache_aware")["source"]},
    ]
    async with route(fake("a", total_pages=512), allow_upload=True) as r:
        record(r)
        await upload(r, *GENERATE)
        r.use(r.server.router.catalog["mine"])
        asked = {**ASK, "candidates": wanted, "keep_roles": True}
        status, advice = await r.post("/admin/advise", asked)
        assert status == 200, advice
        loaded = [one["name"] for one in r.server.router.catalog.describe() if not one["installed"]]
        assert loaded == ["mine"]
    told = [one for row in advice["ranking"] for one in (row, *row["alike"])]
    ranking = {one["title"]: one for one in told}
    given, digest = ranking["mine [given source]"], sha256(source.encode()).hexdigest()
    assert given["source_sha256"] == digest != ranking["mine"]["source_sha256"]
    assert not given.get("failed")
    for name, failure in (
        ("mine:x=1 [given source]", "no parameter 'x'"),
        ("broken", "ZeroDivisionError"),
        ("cache_aware", "the name of an installed strategy"),
    ):
        assert failure in ranking[name]["failed"]


async def test_a_source_is_compared_only_where_sources_may_be_loaded(route, fake):
    async with route(fake("a")) as r:
        asked = {**ASK, "candidates": [{"name": "mine", "source": "1/0"}]}
        status, reply = await r.post("/admin/advise", asked)
        assert (status, reply["error"]["type"]) == (403, "permission_error")
        asked["candidates"][0]["source"] = ""
        assert (await r.post("/admin/advise", asked))[0] == 400


async def test_figures_that_a_strategy_made_up_are_refused(route, fake):
    """It runs in the process that reports: what it reports must at least be figures."""
    async with route(fake("a", total_pages=512)) as r:
        record(r)
        await upload(
            r,
            "import router.advice.worker as worker",
            "worker._figures = lambda figures: {'jct_ms': float('nan'), 'requests': 'many'}",
            *GENERATE,
        )
        _, advice = await r.post("/admin/advise", {**ASK, "candidates": [{"name": "mine"}]})
        assert row(advice, "mine")["failed"] is not None


async def test_requests_that_fail_say_why(route, fake):
    """Engines without room for a prompt, as they tell."""
    async with route(fake("a", total_pages=1)) as r:
        record(r)
        _, advice = await r.post("/admin/advise", {**ASK, "candidates": []})
        assert advice["keep"] and "no request was completed: " in advice["why"]
        assert "tokens" in advice["ranking"][0]["failed"]


async def test_a_strategy_cannot_change_the_traffic_of_the_next_one(route, fake):
    async with route(fake("a", total_pages=512)) as r:
        record(r)
        await upload(
            r,
            "import os",
            "for fd in os.listdir('/proc/self/fd'):",
            "    try:",
            "        if 'memfd:traffic' in os.readlink(f'/proc/self/fd/{fd}'):",
            "            held = open(f'/proc/self/fd/{fd}', 'r+b', buffering=0)",
            "            for change in (lambda: held.write(b'x'), lambda: held.truncate(0)):",
            "                try: change()",
            "                except OSError as refused: found.append(refused.errno)",
            "    except FileNotFoundError: pass",
            "raise ValueError(f'refused: {found}')",
            "yield",
        )
        source, file = r.server.router.catalog.source("mine")
        r.server.router.catalog.load("found = []\n" + source, file=file)
        asked = {**ASK, "candidates": [{"name": "mine"}, {"name": "cache_aware"}]}
        _, advice = await r.post("/admin/advise", asked)
        assert f"refused: [{errno.EPERM}, {errno.EPERM}]" in row(advice, "mine")["failed"]
        assert row(advice, "cache_aware")["completed"] == 24


async def test_too_little_traffic_is_one_sentence(route, fake):
    async with route(fake("a", total_pages=512)) as r:
        _, refused = await r.post("/admin/advise", ASK)
        assert refused["error"]["message"] == "no request of the latest 15 minutes has ended"
        record(r, 3)
        status, refused = await r.post("/admin/advise", {**ASK, "stream": True, "minutes": 5})
        assert status == 409 and "only 3 requests of the latest 5 minutes" in str(refused)
    async with route(fake("a", total_pages=512), traffic_minutes=0.0) as r:
        status, refused = await r.post("/admin/advise", ASK)
        assert status == 409 and "--traffic-minutes is 0" in refused["error"]["message"]
    async with route() as r:
        status, refused = await r.post("/admin/advise", ASK)
        assert (status, refused["error"]["message"]) == (503, "no engine is up")


async def test_engines_of_unknown_speed_are_named(route, fake):
    async with route(fake("a", total_pages=512)) as r:
        record(r)
        (name,) = [backend.id for backend in r.server.router.registry]
        status, refused = await r.post("/admin/advise", {"seeds": 2})
        message = refused["error"]["message"]
        assert status == 409 and message.startswith(f"engine {name} is of unknown speed")
        assert message.endswith("Let it serve more, or give a profile")


async def test_of_a_large_fleet_the_first_steps_of_each_engine_are_used(route, fake, monkeypatch):
    monkeypatch.setattr(engine_facts, "MOST_STEPS", 100)
    steps = [(8 + 9 * n, (8 + 9 * n) ** 2, 0, 0, 0.02) for n in range(30)]
    steps += [(0, 0, 1 + n % 9, 100, 0.02) for n in range(71)]

    async def told() -> EngineStatistics:
        return EngineStatistics(
            steps=steps, puts=[], token_budget=512, max_batch=8, max_waiting=8,
            decode_slowdown=1.5, lease_ms=1000,
        )  # fmt: skip

    async with route(fake("a", total_pages=512), fake("b", total_pages=512)) as r:
        backends = list(r.server.router.registry)
        for backend in backends:
            backend.client.statistics = told  # type: ignore[method-assign]
        facts = await engine_facts.engine_facts(backends)
        assert [one["statistics"]["steps"] for one in facts] == [steps[:50]] * 2
        record(r)
        _, advice = await r.post("/admin/advise", {"seeds": 2, "candidates": []})
        assert [one["steps"] for one in advice["engines"]] == ["its own steps"] * 2


async def test_an_engine_that_hangs_does_not_hold_up_the_advice(route, fake, monkeypatch):
    monkeypatch.setattr(engine_facts, "ASK_S", 0.2)
    async with route(fake("a", total_pages=512)) as r:
        record(r)

        async def forever() -> None:
            await asyncio.Event().wait()

        (backend,) = r.server.router.registry
        backend.client.statistics = forever  # type: ignore[method-assign]
        _, advice = await r.post("/admin/advise", {**ASK, "candidates": []})
        assert "did not tell its statistics within 0.2 s" in advice["notes"][0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"minutes": 0},
        {"minutes": "15"},
        {"seeds": 1},
        {"seeds": 1000},
        {"slo_ttft_ms": -1},
        {"candidates": "all"},
        {"candidates": [{"name": "cache_aware"}] * 65},
        {"candidates": [{"params": {}}]},
        {"candidates": [7]},
        {"profile": "llama"},
        {"surprise": 1},
    ],
)
async def test_bad_questions_are_refused(route, fake, wrong):
    async with route(fake("a", total_pages=512)) as r:
        status, refused = await r.post("/admin/advise", {**ASK, **wrong})
        assert status == 400, refused


async def test_unknown_candidates_are_refused(route, fake):
    async with route(fake("a", total_pages=512)) as r:
        record(r)
        for tried, status in (
            ({"name": "nobody"}, 404), ({"name": "balanced", "params": {"ratio": 5}}, 400),
        ):  # fmt: skip
            got, refused = await r.post("/admin/advise", {**ASK, "candidates": [tried]})
            assert got == status, refused


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    (tmp_path / "lock").touch()
    return tmp_path / "lock"


def is_free(lock: Path) -> bool:
    with lock.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def descriptors() -> list[str]:
    """Kinds of the descriptors of this process, without its connections."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the iteration
            found.append(str(entry.readlink()).partition(":")[0])
    return sorted(kind for kind in found if kind != "socket")


async def test_one_at_a_time_and_it_ends_with_its_client(route, fake, lock):
    async with route(fake("a", total_pages=512)) as r:
        record(r)
        await upload(
            r,
            "import fcntl, os, time",
            f"fcntl.flock(os.open({str(lock)!r}, os.O_RDWR), fcntl.LOCK_EX)",
            "while True: time.sleep(0.01)",
            "yield",
        )
        before = descriptors()
        asked = {**ASK, "candidates": [{"name": "mine"}]}
        async with ClientSession() as leaving:
            asking = asyncio.create_task(
                leaving.post(r.server.url + "/admin/advise", json=asked), name="asking"
            )
            await until(lambda: not is_free(lock), 60)  # a process starts, and simulates first
            status, refused = await r.post("/admin/advise", ASK)
            assert status == 409 and "already being advised" in refused["error"]["message"]
            # Requests are served meanwhile.
            await serve(r, 3)
            asking.cancel()
        await until(lambda: is_free(lock))
        await until(lambda: not r.server.router.advisor._busy)
        status, _ = await r.post("/admin/advise", {**ASK, "candidates": []})
        assert status == 200
        await until(lambda: descriptors() == before)


async def test_it_needs_the_admin_key(route, fake):
    async with route(fake("a", total_pages=512), admin_key="k") as r:
        status, _ = await r.post("/admin/advise", ASK)
        assert status == 401


def test_the_profile_of_these_tests_is_one():
    assert FixedLatency(20.0, 4.0).kind == PROFILE["step"]["kind"]

"""`microserve advise`: its table, its last line, and what `--apply` does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner, Result

from engine.latency import find_profile, profile_fields
from router.cli import cli
from router.rollout import CanaryRules

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """A profile under which decodes beside a prompt are slow: the fake engines tell no speed."""
    fields = profile_fields(find_profile("llama-3.1-8b@a100"))
    step = {"kind": "fixed", "step_ms": 20.0, "prompt_tokens_per_ms": 8.0}
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({**fields, "step": step}))
    return str(file)


def record(r: Any, *, prompt: int, requests: int = 40, gap_s: float = 0.4) -> None:
    began = time.monotonic() - requests * gap_s
    for number in range(requests):
        tokens = [number % 500] * prompt
        r.server.router.traffic.add(began + number * gap_s, [tokens], [60], None, "data_parallel")


async def advise(r: Any, *flags: str) -> Result:
    command = ["advise", "--url", r.server.url, "--seeds", "2", *flags]
    return await asyncio.to_thread(CliRunner().invoke, cli, command)


def engines(fake: Any) -> list[Any]:
    info = fake("a").info.model_copy(update={"context_length": 8192})
    return [fake(name, total_pages=4096, info=info) for name in "ab"]


async def test_keeping_what_one_has_changes_nothing(route, fake, profile):
    async with route(*engines(fake)) as r:
        record(r, prompt=20)
        done = await advise(r, "--profile", profile, "--candidate", "cache_aware", "--apply")
        assert done.exit_code == 0, done.output
        *table, last = done.output.splitlines()
        assert "data_parallel (now)" in "\n".join(table)
        assert any(line.startswith("keep what you have") for line in table)
        document = json.loads(last)
        assert document["keep"] and document["applied"] is None
        assert r.server.router.revisions.candidate is None


async def test_apply_changes_roles_and_starts_a_canary(route, fake, profile):
    async with route(*engines(fake), admin_key="k") as r:
        record(r, prompt=2000)
        asked = ("--profile", profile, "--candidate", "prefill_decode", "--admin-key", "k")
        done = await advise(r, *asked)
        assert json.loads(done.output.splitlines()[-1])["applied"] is None
        router = r.server.router
        assert router.revisions.candidate is None
        done = await advise(r, *asked, "--apply", "--canary", "30", "--min-requests", "7",
                            "--max-ttft-p99-ms", "900")  # fmt: skip
        assert done.exit_code == 0, done.output
        document = json.loads(done.output.splitlines()[-1])
        assert document["proposal"]["title"] == "prefill_decode (1P1D)"
        roles = {backend.id: backend.role for backend in router.registry}
        assert roles == document["applied"]["roles"] == document["proposal"]["roles"]
        assert sorted(roles.values()) == ["decode", "prefill"]
        said = done.output
        assert said.index("roles change at once") < said.index("is a canary with 30 %")
        canary = router.revisions.canary
        assert (canary.rules.percent, canary.rules.min_requests) == (30.0, 7)
        assert canary.rules.max_ttft_p99_ms == 900.0
        assert router.revisions.candidate.bound.strategy.name == "prefill_decode"


async def test_roles_become_what_they_were_if_the_strategy_has_moved_on(
    route, fake, profile, monkeypatch
):
    async with route(*engines(fake)) as r:
        record(r, prompt=2000)
        router = r.server.router
        advise_first = router.advisor.advise

        async def then_another_moves_it(*asked: Any) -> Any:
            advice = await advise_first(*asked)
            r.use(router.catalog["cache_aware"])
            return advice

        monkeypatch.setattr(
            type(router.advisor), "advise", lambda self, *a: then_another_moves_it(*a)
        )
        done = await advise(r, "--profile", profile, "--candidate", "prefill_decode", "--apply")
        assert done.exit_code == 1 and "generation" in done.output.splitlines()[-1]
        document = json.loads(done.stdout.splitlines()[-1])
        assert document["proposal"]["title"] == "prefill_decode (1P1D)"
        assert document["applied"] is None and "microserve strategy show" in document["error"]
        assert {backend.role for backend in router.registry} == {"any"}
        assert router.revisions.candidate is None


@asynccontextmanager
async def without_reply(url: str, to: bytes) -> AsyncIterator[str]:
    """Yield the URL of a proxy that closes the connection in place of a reply to these calls."""
    parts = urlsplit(url)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        their_reader, their_writer = await asyncio.open_connection(parts.hostname, parts.port)
        cut = asyncio.Event()

        async def answer() -> None:
            while (said := await their_reader.read(1 << 16)) and not cut.is_set():
                writer.write(said)
            writer.close()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(answer())
            while asked := await reader.read(1 << 16):
                if asked.startswith(to):
                    cut.set()
                their_writer.write(asked)
            their_writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_a_canary_that_may_have_started_is_said_to(route, fake, profile):
    async with (
        route(*engines(fake)) as r,
        without_reply(r.server.url, b"PUT /admin/strategy") as url,
    ):
        record(r, prompt=2000)
        asked = ("--profile", profile, "--candidate", "prefill_decode", "--apply", "--url", url)
        done = await advise(r, *asked)
        assert done.exit_code == 1
        assert "the canary may run nevertheless" in done.output.splitlines()[-1]
        assert r.server.router.revisions.candidate is not None  # it does


async def test_apply_beside_a_canary_is_refused_before_anything_runs(
    route, fake, profile, monkeypatch
):
    async with route(*engines(fake)) as r:
        record(r, prompt=2000)
        router = r.server.router

        async def not_asked(*asked: Any) -> Any:
            raise AssertionError("it was asked")

        monkeypatch.setattr(type(router.advisor), "advise", not_asked)
        bound = router.catalog["cache_aware"].bind({})
        router.rollout.activate("me", bound, rules=CanaryRules())
        done = await advise(r, "--profile", profile, "--apply")
        assert done.exit_code == 1 and "AssertionError" not in done.output
        assert "generation 2 is a canary" in done.output
        assert "`microserve strategy rollback`" in done.output


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ((), 1, "no request of the latest 15 minutes has ended"),
        (("--profile", "nobody"), 2, "no profile is called 'nobody'"),
        (("--profile", "/no/such.json"), 2, "No such file"),
        (("--minutes", "0"), 2, "0 is not from"),
        (("--candidate", "balanced:ratio"), 2, "not of the form K=V"),
        (("--admin-key", "wrong"), 1, "this is not the key of the admin API"),
    ],
)
async def test_mistakes_are_one_sentence(route, fake, flags, code, said):
    async with route(*engines(fake), admin_key="" if "wrong" not in flags else "k") as r:
        done = await advise(r, *flags)
        assert done.exit_code == code and said in done.output.splitlines()[-1], done.output


async def test_a_router_that_is_not_there():
    command = ["advise", "--url", "http://127.0.0.1:1"]
    runner = CliRunner()
    done = await asyncio.to_thread(
        lambda: runner.invoke(cli, command, auto_envvar_prefix="MICROSERVE")
    )
    assert done.exit_code == 1 and "127.0.0.1:1" in done.output
    assert "--url or MICROSERVE_ADVISE_URL sets the URL" in done.output
    assert "`microserve up` starts one" in done.output

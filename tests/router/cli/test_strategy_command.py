"""`microserve strategy`, and the mistakes that `up` and `router` report at their start."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import ForkedProcess, run_microserve
from router_process import RouterProcess, until

from router.base.errors import StartFailed

pytestmark = [pytest.mark.slow, pytest.mark.processes]
SOURCE = '''
from typing import Annotated
from pydantic import Field
from router import strategy

@strategy
async def mine(request, cluster, *, share: Annotated[float, Field(ge=0, le=1, description="of it")] = 0.5):
    """My own."""
    async for chunk in cluster.engines.round_robin().start_generate(request):
        yield chunk
'''  # noqa: E501


@pytest.fixture(scope="module")
def router(real_engines: list[str]) -> Iterator[RouterProcess]:
    router = RouterProcess(real_engines, "data_parallel", "--allow-upload")
    yield router
    router.kill()


def command(*arguments: str) -> tuple[int, str]:
    """Run `microserve …`; return its exit code and all its output."""
    process = ForkedProcess(run_microserve, *arguments)
    try:
        code, said = process.wait(60), ""
        while True:
            try:
                said += process.line() + "\n"
            except StartFailed:
                return code, said + process.log
    finally:
        process.kill()


def test_the_commands(router, tmp_path):
    def strategy(*arguments: str) -> tuple[int, str]:
        return command("strategy", "--url", router.url, *arguments)

    file = tmp_path / "any_name.py"
    file.write_text(SOURCE)
    code, said = strategy("load", str(file))
    assert (code, said) == (0, "loaded mine\n")
    code, said = strategy("show", "mine")
    assert said.startswith("mine\n\nMy own.\n")
    assert "share: number ≥ 0 ≤ 1 = 0.5  of it" in said
    generation = router.strategies()["active"]["generation"]
    code, said = strategy("use", "mine", "--param", "share=0.25")
    assert (code, said) == (0, f"generation {generation + 1}: mine share=0.25\n")
    assert "* mine" in strategy("list")[1]
    code, said = strategy("use", "mine", "--param", "share=2")
    assert code == 1
    assert "strategy mine: share=2: Input should be less than or equal to 1" in said
    code, said = strategy("use", "balanced", "--if-generation", "1")
    assert (code, f"generation {generation + 1} is active, not 1" in said) == (1, True)
    code, said = strategy("use", "balanced", "--canary", "10", "--min-requests", "1000")
    assert said == f"generation {generation + 2}: balanced ratio=0.1, a canary\n"
    running = (
        f"generation {generation + 2}: balanced ratio=0.1 is a canary with 10 % of the requests"
    )
    for shown in (strategy("list"), strategy("show"), strategy("show", "balanced")):
        assert f"{running} since 20" in shown[1], shown
        assert "0 of 1000 requests ended, 0 failed, no verdict yet" in shown[1]
        assert "`microserve strategy rollback` ends it" in shown[1]
    assert "~ balanced" in strategy("list")[1]
    assert "is a canary" not in strategy("show", "mine")[1]
    code, said = strategy("use", "balanced", "--canary", "10")
    assert code == 1 and "`microserve strategy rollback`" in said
    code, said = strategy("show", "nobody")
    assert code == 1 and "`microserve strategy load FILE` adds one" in said
    assert strategy("rollback")[1] == f"generation {generation + 1}: mine share=0.25\n"
    assert "data_parallel" in strategy("rollback")[1]
    code, said = strategy("promote")
    assert (code, said.startswith("Error: there is no canary; ")) == (1, True)
    began = int(strategy("use", "mine", "--canary", "10")[1].split()[1].rstrip(":"))
    assert strategy("promote") == (0, f"generation {began}: mine share=0.5\n")
    assert router.strategies()["active"]["generation"] == began
    assert router.strategies()["canary"] is None
    file.write_text(SOURCE.replace("yield chunk", "yield chunk.text"))
    code, said = strategy("load", str(file))
    assert (code, "yielded no chunk but 'w" in said) == (1, True)
    assert len(said.splitlines()) == 1


def test_a_watched_file_is_loaded_when_it_is_saved(router, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    watching = ForkedProcess(
        run_microserve, "strategy", "--url", router.url, "load", str(file), "--watch"
    )
    try:
        assert watching.line() == "loaded mine"
        before = router.use("mine", share=0.75)
        file.write_text(SOURCE.replace("My own.", "Another."))
        assert watching.line() == "loaded mine"
        assert watching.line() == f"generation {before + 1}: mine share=0.75"
        file.write_text(SOURCE + "\n\n1/0\n")
        until(lambda: "mine.py:13: ZeroDivisionError" in watching.log)
        assert "not loaded, nothing changed" in watching.log
        assert router.strategies()["active"]["generation"] == before + 1
        file.unlink()  # as some editors do
        file.write_text(SOURCE)
        assert watching.line() == "loaded mine"
        assert watching.line() == f"generation {before + 2}: mine share=0.75"
        assert router.tokens([1, 2, 3])
    finally:
        watching.kill()


def test_a_dry_run_needs_no_router(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    code, said = command("strategy", "check", "--dry-run", str(file))
    assert (code, said.startswith(f"{file}: dry run ok, ")) == (0, True)
    assert command("strategy", "check", "balanced", "--dry-run", "--param", "ratio=1")[0] == 0
    file.write_text(SOURCE + "nothing\n")
    code, said = command("strategy", "check", str(file))
    assert (code, said) == (
        2, f"Error: {file}:11: NameError: name 'nothing' is not defined\n",
    )  # fmt: skip


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield str(listener.getsockname()[1])


def test_up_and_router_report_mistakes_at_once(tmp_path: Path, taken: str):
    """They print one line and exit with code 2 before any engine is loaded."""
    bad = tmp_path / "bad.py"
    bad.write_text("from router import strategy\n\n1/0\n")
    mistakes = [
        (["--strategy", str(bad)], f"{bad}:3: ZeroDivisionError"),
        (["--strategy", str(tmp_path / "absent.py")], "No such file"),
        (["--strategy", "nothing"], "no strategy 'nothing'"),
        (["--strategy", "balanced", "--param", "ration=1"], "no parameter 'ration'"),
        (["--strategy", "balanced", "--param", "ratio=7"], "ratio=7"),
        (["--port", taken], "Address already in use"),
        (["--port", "70000"], "--port 70000: ports range from 0 to 65535"),
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid"),
        (["--state-file", str(tmp_path / "absent" / "state.json")], "there is no folder"),
        (["--audit-log", str(tmp_path / "absent" / "audit")], "there is no folder"),
    ]  # fmt: skip
    for flags, says in mistakes:
        code, said = command("up", "no/such/model", "--port", "0", *flags)
        assert code == 2, said
        assert len(said.splitlines()) == 1, said
        assert says in said
    for flags, says in (mistakes[0], mistakes[4]):
        code, said = command("router", *flags)
        assert (code, len(said.splitlines())) == (2, 1), said
        assert says in said
    code, said = command("router", "--port", "70000")
    assert code == 2 and "70000 is not from 0 to 65535" in said


def test_the_strategy_flag_names_a_files_only_strategy_as_load_does(tmp_path):
    """A file's only strategy has its own name, not the file's."""
    file = tmp_path / "any_name.py"
    file.write_text(SOURCE)
    router = RouterProcess([], file)
    try:
        assert router.strategies()["active"]["name"] == "mine"
    finally:
        router.kill()

"""`microserve strategy check`, run as a user does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from router.cli.on_router.strategy import strategy

pytestmark = pytest.mark.slow
SOURCE = """
from router import strategy

@strategy
async def mine(request, cluster):
    async for chunk in cluster.engines.round_robin().start_generate(request):
        yield chunk
"""


class Command:
    """The command and its descendants, which inherit an environment variable unique to it."""

    def __init__(self, *arguments: str) -> None:
        self._variable = f"STARTED_BY={uuid.uuid4().hex}".encode()
        name, _, value = self._variable.decode().partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "router", "strategy", "check", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, name: value, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip

    def running(self) -> list[int]:
        return [
            int(folder.name)
            for folder in Path("/proc").iterdir()
            if folder.name.isdigit() and self._variable in _environment(folder)
        ]

    def wait_until_gone(self) -> None:
        """Wait until all its processes have ended."""
        give_up = time.monotonic() + 20
        while running := self.running():
            assert time.monotonic() < give_up, running
            time.sleep(0.02)


def _environment(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:  # the process has ended
        return b""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    yield file


def check(*arguments: str) -> tuple[int, list[str]]:
    """Run `microserve strategy check` in this process; return its exit code and output lines."""
    result = CliRunner().invoke(strategy, ["check", *arguments])
    return result.exit_code, result.output.splitlines()


def test_a_line_for_each_check(file: Path) -> None:
    code, said = check(str(file), "--only", "prefixes", "--only", "one_token")
    assert code == 0, said
    dry, starting, *lines, verdict = said
    assert dry.startswith(f"{file}: dry run ok")
    assert starting == "starting engines with tiny …"
    assert [line.partition(":")[0] for line in lines] == ["ok      prefixes", "ok      one_token"]
    assert verdict == f"{file}: ok, 18 requests to engines with tiny"


def test_a_failure_on_real_engines_exits_with_code_1(file: Path) -> None:
    file.write_text(SOURCE.replace("yield chunk", "chunk.text = ''\n        yield chunk"))
    code, said = check(str(file), "--only", "one_token", "--only", "logprobs")
    assert code == 1, said
    assert said[2].startswith("FAILED  one_token: text is '', not ")
    assert said[-1].startswith(f"{file}: 2 of 2 checks failed")


def test_a_model_that_does_not_load_exits_with_code_2(file: Path) -> None:
    code, said = check(str(file), "--model", "/no/such/model")
    assert code == 2
    assert "/no/such/model" in said[-1]


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.thorough), signal.SIGKILL],
)
def test_a_signal_ends_all_its_processes(file: Path, number: signal.Signals) -> None:
    command = Command(str(file), "--only", "one_token", "--only", "streams_that_break")
    assert command.process.stdout is not None
    while not command.process.stdout.readline().startswith("ok      one_token"):
        assert command.process.poll() is None
    assert len(command.running()) > 6  # itself, four engines, two routers
    command.process.send_signal(number)
    command.wait_until_gone()
    command.process.stdout.close()
    assert command.process.wait(20) != 0

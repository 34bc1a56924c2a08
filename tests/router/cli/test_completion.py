"""Shell completion, by the protocol that the scripts of click speak with the program."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from router.cli import cli

pytestmark = pytest.mark.processes


def asking(words: str) -> dict[str, str]:
    """Return the variables by which a script asks for completions of the last word."""
    last = str(len(words.split(" ")) - 1)
    return {"_MICROSERVE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": last}


def test_the_program_answers_a_shell():
    done = subprocess.run(
        [sys.executable, "-c", "from router.cli import main; main()"],
        env={**os.environ, **asking("microserve config ")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == ["plain,check", "plain,show"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("microserve con", ["config"]),
        ("microserve up --stra", ["--strategy"]),
        ("microserve up --page-si", ["--page-size"]),  # also a rare one
        ("microserve config show --stra", ["--strategy"]),
        ("microserve up --strategy mig", ["migrate"]),
        ("microserve up --strategy ./my", ["./my"]),  # a file, which the shell completes
        ("microserve strategy use bal", ["balanced"]),
        ("microserve engine tiny --dtype b", ["bfloat16"]),
        ("microserve up ti", ["tiny"]),
    ],
)
def test_commands_flags_and_values_are_completed(monkeypatch, words: str, wanted: list[str]):
    for name, value in asking(words).items():
        monkeypatch.setenv(name, value)
    found = BashComplete(cli, {}, "microserve", "_MICROSERVE_COMPLETE").complete()
    assert [line.partition(",")[2] for line in found.splitlines()] == wanted


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_asks_this_program(shell: str):
    done = CliRunner().invoke(cli, ["completion", shell])
    assert done.exit_code == 0
    assert f"_MICROSERVE_COMPLETE={shell}_complete" in done.output


def test_bash_accepts_its_script():
    script = CliRunner().invoke(cli, ["completion", "bash"]).output
    asked = f"{script}\ncomplete -p microserve"
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert "_microserve_completion" in done.stdout


def test_an_unknown_shell_is_refused():
    assert CliRunner().invoke(cli, ["completion", "csh"]).exit_code == 2

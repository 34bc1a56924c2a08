"""`--help` lists options by topic."""

from __future__ import annotations

import dataclasses

import click
import pytest
from click.testing import CliRunner

from engine.protocol import EngineConfig
from router.base.config import RouterConfig
from router.cli import cli
from router.cli.options import Number


def sections(*command: str) -> dict[str, str]:
    """Return the text under each heading of a command's help."""
    shown = CliRunner().invoke(cli, [*command, "--help"], terminal_width=100).output
    found, heading = {}, ""
    for line in shown.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            heading = line[:-1]
        found[heading] = found.get(heading, "") + line + "\n"
    return found


def test_router_options_are_under_their_headings():
    shown = sections("router")
    for field in dataclasses.fields(RouterConfig):
        if "help" in field.metadata:
            assert f"--{field.name.replace('_', '-')} " in shown[field.metadata["group"]]
    assert "--engine URL" in shown["Engines"]
    assert "--param K=V" in shown["Strategy"]
    assert list(shown)[-1] == "Options" and shown["Options"].split() == [
        "Options:", "-h,", "--help", "Show", "this", "message", "and", "exit.",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "command", ["chat", "bench", "strategy use", "strategy check", "advise", "traffic"]
)
def test_all_other_options_have_a_heading(command):
    shown = sections(*command.split())
    assert len(shown) > 2
    assert shown["Options"].count("--") == 1


@pytest.mark.parametrize("command", [(), ("strategy",)])
def test_a_list_of_commands_has_whole_sentences(command):
    listed = CliRunner().invoke(cli, [*command, "--help"], terminal_width=80).output
    described = listed.partition("Commands:")[2].splitlines()[1:]
    assert len(described) >= 6
    assert all(line.startswith("  ") and line.endswith(".") for line in described), listed
    assert "..." not in "".join(described), listed


def test_an_unknown_log_level_is_refused():
    done = CliRunner().invoke(cli, ["router", "--log-level", "loud", "--port", "0"])
    assert done.exit_code == 2 and "'loud' is not one of" in done.output


def test_a_command_called_by_itself_has_the_same_help():
    command = cli.commands["router"]
    assert "  -h, --help" in CliRunner().invoke(command, ["-h"]).output


NUMBERS = [
    (command, field.name, getattr(config(), field.name))
    for command, config in (("router", RouterConfig), ("engine", EngineConfig))
    for field in dataclasses.fields(config)
    if type(getattr(config(), field.name, None)) in (int, float)
]


@pytest.mark.parametrize(("command", "name", "default"), NUMBERS)
def test_a_number_out_of_its_range_is_refused(command, name, default):
    """Nothing starts: the value is refused before the model or the strategy is looked at."""
    flag = f"--{name.replace('_', '-')}"
    for value in ("-1", "nan", "inf", "1e400", "9" * 30):
        done = CliRunner().invoke(cli, [command, *["mock"] * (command == "engine"), flag, value])
        assert done.exit_code == 2, done.output
        assert flag in done.output or flag.removesuffix("-s") in done.output


@pytest.mark.parametrize("flag", ["--attempts", "--max-body-mb", "--breaker-failures"])
def test_zero_is_refused_where_it_makes_no_sense(flag):
    done = CliRunner().invoke(cli, ["router", flag, "0"])
    assert done.exit_code == 2 and f"Invalid value for '{flag}'" in done.output


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--port", "65536"),
        ("--attempts", "101"),
        ("--retry-share", "1.01"),
        ("--stream-interval-ms", "10001"),
        ("--request-timeout", "0"),
        ("--health-timeout", "0.0009"),
        ("--client-stall", "1e8"),
        ("--max-body-mb", "4097"),
    ],
)
def test_a_number_just_beyond_its_range_is_refused(flag, value):
    done = CliRunner().invoke(cli, ["router", flag, value])
    assert done.exit_code == 2 and f"{value} is not from" in done.output, done.output


def test_a_range_includes_its_ends():
    number = Number(int, 1, 5)
    assert [number.convert(text, None, None) for text in ("1", "5")] == [1, 5]
    for text in ("0", "6", "1.0", "x"):
        with pytest.raises(click.BadParameter):
            number.convert(text, None, None)
    assert Number(float).convert("-1e300", None, None) == -1e300
    with pytest.raises(click.BadParameter, match="2 or more"):
        Number(float, 2).convert("1.9", None, None)
    with pytest.raises(click.BadParameter):
        Number(float).convert("nan", None, None)

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


def sections(*command: str, all: bool = False) -> dict[str, str]:
    """Return the text under each heading of a command's help."""
    flag = "--help-all" if all else "--help"
    shown = CliRunner().invoke(cli, [*command, flag], terminal_width=100).output
    found, heading = {}, ""
    for line in shown.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            heading = line[:-1]
        found[heading] = found.get(heading, "") + line + "\n"
    return found


CONFIGS = [("router", RouterConfig), ("engine", EngineConfig)]


@pytest.mark.parametrize(("command", "config"), CONFIGS)
def test_options_are_under_their_headings_and_rare_ones_in_the_full_help_only(command, config):
    usual, full = sections(command), sections(command, all=True)
    for field in dataclasses.fields(config):
        if "help" in field.metadata:
            flag, group = f"--{field.name.replace('_', '-')} ", field.metadata["group"]
            assert flag in full[group]
            assert (flag in usual.get(group, "")) is not field.metadata.get("rare", False)
    rare = sum(field.metadata.get("rare", False) for field in dataclasses.fields(config))
    assert f"Show all options: {rare} more." in usual["Options"]


def test_other_options_of_the_router_are_under_headings_too():
    shown = sections("router")
    assert "--engine URL" in shown["Engines"]
    assert "--param K=V" in shown["Strategy"]
    assert list(shown)[-1] == "Options" and "-h, --help" in shown["Options"]


def test_up_has_a_short_help_and_a_full_one():
    usual, full = (sections("up", all=all) for all in (False, True))
    assert "--pool-pages" in usual["KV pool"] and "--page-size" not in str(usual)
    assert "--page-size" in full["KV pool"]
    for flag in ("--engines", "--port", "--strategy", "--api-key", "--dtype"):
        assert f"{flag} " in str(usual)


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
    command = cli.get_command(click.Context(cli), "router")
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


@pytest.mark.parametrize("url", ["foo", "127.0.0.1:8000", "ftp://x", "http://", "http://x:y"])
@pytest.mark.parametrize(
    "command", ["top --url {}", "chat hello --url {}", "bench --url {}", "strategy --url {} list"]
)
def test_what_is_no_url_is_refused(command, url):
    refused = CliRunner().invoke(cli, command.format(url).split())
    said = f"'{url}' is not of the form http://HOST:PORT or https://HOST."
    assert refused.exit_code == 2 and refused.output.rstrip().endswith(said), refused.output


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

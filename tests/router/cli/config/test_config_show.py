"""What is in force: defaults < file < environment < flags, each value with its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from router.cli import cli
from router.cli.config.schema import Schema
from router.cli.options import Number
from router.cli.up import up

FILE = "fleet.toml"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def show(text: str, *flags: str, env: dict[str, str] | None = None) -> dict[str, tuple[Any, str]]:
    """Return each key's value and source."""
    Path(FILE).write_text(text)
    arguments = ["config", "show", "--json", "--config", FILE, *flags]
    done = CliRunner().invoke(cli, arguments, env=env)
    assert done.exit_code == 0, done.output
    return {key: (row["value"], row["source"]) for key, row in json.loads(done.output).items()}


def test_each_layer_wins_over_those_before_it():
    text = "[router]\nport = 7001\nattempts = 7\nmax-queue = 7\n"
    env = {"MICROSERVE_UP_MAX_QUEUE": "8", "MICROSERVE_UP_ATTEMPTS": "8"}
    shown = show(text, "--attempts", "9", env=env)
    assert shown["router.host"] == ("127.0.0.1", "default")
    assert shown["router.port"] == (7001, "fleet.toml:2")
    assert shown["router.max_queue"] == (8, "environment MICROSERVE_UP_MAX_QUEUE")
    assert shown["router.attempts"] == (9, "flag")


def test_a_flag_with_the_value_of_the_default_wins_too():
    shown = show("[engine]\ntp = 2\n[[pool]]\n[pool.engine]\ntp = 4\n", "--tp", "1")
    assert shown["engine.tp"] == (1, "flag")
    assert "pool[0].engine.tp" not in shown


def test_pools_of_one_role_may_differ():
    text = "[engine]\ntp = 2\n[[pool]]\ncount = 3\n[[pool]]\nname = 'b'\n[pool.engine]\ntp = 4\n"
    shown = show(text)
    assert (shown["pool[0].count"], shown["pool[1].name"]) == (
        (3, "fleet.toml:3"),
        ("b", FILE + ":5"),
    )
    assert shown["engine.tp"] == (2, "fleet.toml:2")
    assert shown["pool[1].engine.tp"] == (4, "fleet.toml:8")
    assert "pool[0].engine.tp" not in shown  # that of [engine]


def test_a_number_of_engines_as_a_flag_replaces_the_pools():
    shown = show("[[pool]]\ncount = 3\n[[pool]]\nrole = 'decode'\n", "--engines", "4")
    assert shown["pool[0].count"] == (4, "flag")
    assert "pool[1].role" not in shown
    shown = show("engines = 3\nprefill_flags = ''\n", "--prefill", "1", "--decode", "2")
    assert shown["engines"] == (None, "default")
    assert [shown[f"pool[{n}].count"] for n in (0, 1)] == [(1, "flag"), (2, "flag")]


def test_parameters_are_merged_and_belong_to_their_strategy():
    text = "[router]\nstrategy = 'balanced'\n[router.params]\nratio = 0.1\n"
    assert show(text)["router.params.ratio"] == (0.1, "fleet.toml:4")
    assert show(text, "--param", "ratio=0.2")["router.params.ratio"] == (0.2, "flag")
    assert show(text, "--strategy", "balanced")["router.params.ratio"] == (0.1, "fleet.toml:4")
    assert "router.params.ratio" not in show(text, "--strategy", "migrate")


def test_the_router_and_the_engines_may_differ_in_what_one_flag_sets():
    text = "[router]\nlog_level = 'info'\n[engine]\nlog_level = 'error'\n"
    shown = show(text)
    assert (shown["router.log_level"][0], shown["engine.log_level"][0]) == ("info", "error")
    shown = show(text, "--log-level", "debug")
    assert shown["router.log_level"] == shown["engine.log_level"] == ("debug", "flag")


def test_keys_come_from_the_file_others_or_the_environment_and_are_never_printed(folder: Path):
    (folder / "admin.key").write_text("hidden-admin\n")
    text = (
        "[keys]\napi_key = 'hidden-client'\nadmin_key = {file = 'admin.key'}\n"
        "engine_api_key = {env = 'OF_ENGINES'}\n"
    )
    env = {"OF_ENGINES": "hidden-engine", "MICROSERVE_UP_API_KEY": "hidden-flag"}
    env |= {"MICROSERVE_UP_STORE": "redis://:hidden-too@h", "MICROSERVE_UP_WORKERS": "2"}
    shown = show(text, env=env)
    assert shown["keys.api_key"] == ("***", "environment MICROSERVE_UP_API_KEY")
    assert shown["keys.admin_key"] == ("***", "fleet.toml:3")
    assert shown["keys.engine_api_key"] == ("***", "fleet.toml:4")
    assert shown["keys.openai_api_key"] == ("", "default")
    assert shown["keys.store"] == ("***", "environment MICROSERVE_UP_STORE")
    assert shown["router.workers"] == (2, "environment MICROSERVE_UP_WORKERS")
    lines = CliRunner().invoke(cli, ["config", "show", "--config", FILE], env=env).output
    assert "hidden" not in lines + str(shown)


def test_the_text_names_each_source_and_can_leave_out_defaults():
    Path(FILE).write_text("model = 'tiny'\n[router]\nport = 0\n")
    arguments = ["config", "show", "--changed", "--config", FILE, "--threads", "1"]
    done = CliRunner().invoke(cli, arguments)
    rows = [line.split("  # ") for line in done.output.splitlines()]
    assert [(left.strip(), source) for left, source in rows] == [
        ('model = "tiny"', "fleet.toml:1"),
        ("router.port = 0", "fleet.toml:3"),
        ("engine.threads = 1", "flag"),
    ]


def test_without_a_file_flags_and_defaults_are_shown():
    done = CliRunner().invoke(cli, ["config", "show", "tiny", "--changed"])
    assert done.output.split("  # ") == ['model = "tiny"', "flag\n"]


OPTIONS = [param for param in up.params if param.name not in ("config", "params")]


def another(param: click.Parameter) -> Any:
    """Return a value that is not the default."""
    kind = param.type
    if param.nargs == -1:
        return ["--max-num-seqs"]
    if isinstance(kind, click.Choice):
        return next(one for one in kind.choices if one != param.default)
    if isinstance(kind, Number):
        return int(kind.least) + 3 if kind.most > 3 else 0.75
    if isinstance(param, click.Option) and param.is_flag:
        return True
    return "another"


@pytest.mark.parametrize("param", OPTIONS, ids=lambda param: param.name)
def test_every_flag_of_up_can_be_said_in_the_file(param: click.Parameter):
    """Also one that is added tomorrow: no list of keys stands beside the options."""
    schema = Schema.of(up)
    tables = {"": schema.top, "router": schema.router, "keys": schema.keys, "engine": schema.engine}
    found = [table for table, settings in tables.items() if param.name in settings]
    assert found, f"no table has {param.name}"
    for table in found:
        value = another(tables[table][str(param.name)].param)
        key = "file" if param.name == "api_key_file" else str(param.name)
        for spelled in (key, key.replace("_", "-")):
            head = f"[{table}]\n" if table else "\n"
            shown = show(f"{head}{spelled} = {json.dumps(value)}\n")
            said, source = shown[f"{table}.{key}" if table else key]
            assert source == "fleet.toml:2"
            if table == "keys" and key != "file":
                assert said == "***"
            elif isinstance(value, str):
                assert str(said).endswith(value)  # a path begins in the file's folder
            else:
                assert said == value


def test_every_flag_of_the_router_can_be_said_in_the_file():
    schema = Schema.of(up)
    said = {*schema.router, *schema.keys}
    named = {param.name for param in cli.get_command(click.Context(cli), "router").params}
    assert named - said == {"engines", "params", "parent_pid"}

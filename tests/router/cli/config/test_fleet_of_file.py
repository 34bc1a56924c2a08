"""What `up` makes of a file: the arguments of the router, the pools, and keys apart from both."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from router.cli.config import read_effective
from router.cli.config.schema import Schema
from router.cli.options import Number
from router.cli.up import _fleet_config, up
from router.supervisor import FleetConfig

FILE = """
model = "mock"
no-respawn = true
state_file = "state.json"
[router]
host = "::1"
port = 7000
strategy = "balanced"
served-model-name = "m"
log_level = "info"
health-interval-s = 0.25
params = {ratio = 0.5}
workers = 3
store-password-file = "password"
[engine]
backend = "vllm"
vllm_args = "--enforce-eager"
vllm_flags = ["--max-num-seqs", "8"]
page-size = 32
[keys]
file = "keys.txt"
admin_key = "of-admin"
openai_api_key = "of-servers"
store = "rediss://u@h/1#f"
[[pool]]
role = "prefill"
[[pool]]
role = "prefill"
name = "big"
count = 2
labels = {gpu = "b"}
[pool.engine]
backend = "microserve"
vllm_args = ""
vllm_flags = []
page-size = 16
"""


def fleet(folder: Path, *flags: str, text: str = FILE) -> FleetConfig:
    (folder / "fleet.toml").write_text(text)
    arguments = ["--config", str(folder / "fleet.toml"), *flags]
    with up.make_context("up", arguments, auto_envvar_prefix="MICROSERVE_UP") as context:
        return _fleet_config(read_effective(context, up))


def test_the_router_gets_what_differs_from_defaults_and_no_keys(tmp_path: Path):
    found = fleet(tmp_path)
    assert found.model == "mock" and found.respawn is False
    assert (found.host, found.port) == ("::1", 7000)
    assert found.state_file == tmp_path / "state.json"
    assert (found.admin_key, found.openai_api_key, found.api_key) == ("of-admin", "of-servers", "")
    assert found.store == "rediss://u@h/1#f"
    pairs = dict(zip(found.router_args[::2], found.router_args[1::2], strict=True))
    assert pairs == {
        "--strategy": "balanced",
        "--served-model-name": "m",
        "--log-level": "info",
        "--health-interval-s": "0.25",
        "--api-key-file": str(tmp_path / "keys.txt"),
        "--workers": "3",
        "--store-password-file": str(tmp_path / "password"),
        "--param": "ratio=0.5",
    }


def test_engines_get_the_settings_of_their_pool_over_those_of_all(tmp_path: Path):
    one, two = fleet(tmp_path).pools
    assert (one.role, one.count, one.name, one.labels) == ("prefill", 1, "", {})
    assert (two.role, two.count, two.name, two.labels) == ("prefill", 2, "big", {"gpu": "b"})
    assert one.flags == {
        "backend": "vllm",
        "vllm_args": "--enforce-eager --max-num-seqs 8",
        "page_size": 32,
    }
    assert two.flags == {}  # its values are the defaults again


def test_every_setting_of_the_router_reaches_it(tmp_path: Path):
    """A new flag of the router is either passed on or, as a key, in its environment."""
    schema = Schema.of(up)
    fields = {field.name for field in dataclasses.fields(FleetConfig)}
    own = {"host", "port", "params"}  # arguments that `Fleet` adds
    assert {name for name, one in schema.keys.items() if one.secret} <= fields
    values = {int: 3, float: 3.5, str: "x"}
    text = "[router]\n"
    for name, one in schema.router.items():
        if name in own or name in ("strategy", "tls_key"):
            continue
        kind, default = one.param.type, one.default
        if isinstance(kind, click.Choice):
            value: Any = next(choice for choice in kind.choices if choice != default)
        elif isinstance(default, bool):
            value = True
        else:
            value = values[type(default)]
            if isinstance(kind, Number):
                value = type(default)(max(kind.least, min(kind.most, value)))
                value = value if value != default else type(default)(kind.least)
        text += f"{name} = {json.dumps(value)}\n"
    arguments = fleet(tmp_path, text=text).router_args
    written = {line.partition(" = ")[0] for line in text.splitlines()[1:]}
    missing = {name for name in written if f"--{name.replace('_', '-')}" not in arguments}
    assert not missing
    assert {"workers", "store_password_file", "max_queue"} <= written


def test_flags_win_in_every_pool_and_flags_of_a_role_in_its_pools(tmp_path: Path):
    found = fleet(tmp_path, "tiny", "--page-size", "8", "--port", "0", "--prefill-flags", "--tp 2")
    assert (found.model, found.port) == ("tiny", 0)
    assert [pool.flags["page_size"] for pool in found.pools] == [8, 8]
    assert [pool.arguments for pool in found.pools] == [("--tp", "2")] * 2
    found = fleet(tmp_path, "--workers", "5", "--store", "redis://other")
    assert found.store == "redis://other"
    assert found.router_args[found.router_args.index("--workers") + 1] == "5"


def test_without_pools_the_file_counts_engines_by_role(tmp_path: Path):
    found = fleet(tmp_path, text='prefill = 1\ndecode = 2\ndecode_flags = "--pp 2"\n')
    assert [(pool.role, pool.count, pool.arguments) for pool in found.pools] == [
        ("prefill", 1, ()),
        ("decode", 2, ("--pp", "2")),
    ]
    (only,) = fleet(
        tmp_path, "--engines", "3", text='prefill = 1\nprefill_flags = "--pp 2"\n'
    ).pools
    assert (only.role, only.count, only.arguments) == ("any", 3, ())


@pytest.mark.processes
def test_a_key_among_the_flags_of_show_is_that_of_up(tmp_path: Path):
    """The program moves keys to its environment, where `show` finds them."""
    done = subprocess.run(
        [sys.executable, "-m", "router", "config", "show", "--changed", "--admin-key", "hidden"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    line = 'keys.admin_key = "***"  # environment MICROSERVE_UP_ADMIN_KEY\n'
    assert done.stdout == line

"""The commands for fleets on Ray, without Ray."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from router.cli import cli
from router.cli.config import read_effective
from router.cli.on_ray import read_ray_flags
from router.cli.on_ray.start import _spec
from router.cli.up import up
from router.ray_fleet import connection
from router.ray_fleet.actors import Record
from router.ray_fleet.plan import RayFleetSpec
from router.supervisor import FleetConfig


def flags(*arguments: str):
    context = up.make_context("up", list(arguments), auto_envvar_prefix="MICROSERVE_UP")
    return read_ray_flags(read_effective(context, up))


@pytest.mark.parametrize(
    "command", ["up mock --on auto --port 0", "status", "scale --engines 1", "down"]
)
def test_without_ray_the_remedy_is_said(command: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "find_spec", lambda _: None)
    ended = CliRunner().invoke(cli, command.split())
    assert ended.exit_code == 1
    assert "Ray is not installed; `pip install" in ended.output


def test_a_client_address_needs_grpc(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "find_spec", lambda name: name == "ray" or None)
    ended = CliRunner().invoke(cli, ["down", "--on", "ray://127.0.0.1:1"])
    assert ended.exit_code == 1 and "needs grpcio" in ended.output


def test_flags_for_ray_need_on():
    assert flags("mock") is None
    for some in (["--detach"], ["--fleet", "a"], ["--num-cpus", "2"], ["--routers", "2"]):
        with pytest.raises(click.UsageError, match=f"{some[0]} needs --on"):
            flags("mock", *some)


def test_several_routers_need_a_store():
    with pytest.raises(click.UsageError, match="--store"):
        flags("mock", "--on", "auto", "--routers", "2")
    found = flags("mock", "--on", "auto", "--routers", "2", "--store", "redis://h/0")
    assert found is not None and found.routers == 2


def test_gpus_are_reserved_for_each_worker_unless_said():
    def gpus(*arguments: str) -> float:
        found = flags("mock", "--on", "auto", *arguments)
        assert found is not None
        return found.num_gpus

    assert gpus() == 0
    assert gpus("--device", "cuda") == 1
    assert gpus("--device", "cuda", "--tp", "2", "--pp", "2") == 4
    assert gpus("--device", "cuda", "--tp", "2", "--num-gpus", "0.5") == 0.5


def test_a_router_listens_on_its_node_unless_told(tmp_path: Path):
    found = flags("mock", "--on", "auto")
    assert found is not None and found.host == ""
    found = flags("mock", "--on", "auto", "--host", "0.0.0.0")
    assert found is not None and found.host == "0.0.0.0"


def test_a_fleets_file_may_say_it(tmp_path: Path):
    file = tmp_path / "fleet.toml"
    file.write_text('model = "mock"\non = "ray://h:10001"\nfleet = "blue"\nnum_cpus = 2\n')
    found = flags("--config", str(file))
    assert found is not None
    assert (found.on, found.fleet, found.num_cpus) == ("ray://h:10001", "blue", 2.0)


def test_files_that_routers_read_go_with_the_fleet(tmp_path: Path):
    file = tmp_path / "fleet.toml"
    names = ("store_password_file", "tls_cert", "tls_key", "engine_ca", "engine_cert",
             "engine_cert_key")  # fmt: skip
    lines = ['model = "mock"\non = "auto"\n[router]', *(f'{name} = "{name}"' for name in names)]
    file.write_text("\n".join(lines))
    for name in names:
        (tmp_path / name).write_text(f"text of {name}")
    context = up.make_context("up", ["--config", str(file)], auto_envvar_prefix="MICROSERVE_UP")
    effective = read_effective(context, up)
    found = read_ray_flags(effective)
    assert found is not None
    router = {name: str(entry.value or "") for name, entry in effective.router.items()}
    files = _spec(found, FleetConfig("mock", (), (), "", 8000), router).files
    for name in names:
        assert files[f"--{name.replace('_', '-')}"][1] == f"text of {name}".encode()


def test_scale_must_be_told_how_many():
    ended = CliRunner().invoke(cli, ["scale"])
    assert ended.exit_code == 2 and "--prefill N" in ended.output


def test_one_command_at_a_time_changes_a_fleet():
    record = Record(RayFleetSpec("f", FleetConfig("mock", (), (), "", 8000), "s"))
    assert record.claim("a", "scale") == ""
    assert record.claim("b", "scale") == "scale"
    assert record.claim("a", "scale") == ""  # renews it
    record.unclaim("b")
    assert record.claim("b", "scale") == "scale"
    record.unclaim("a")
    assert record.claim("b", "scale") == ""

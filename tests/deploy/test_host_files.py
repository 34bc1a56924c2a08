"""Dockerfile, compose file and systemd units agree with the program and the manifests."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib

import pytest
import yaml
from deployment_files import DEPLOY, NOT_OF_FLAGS, ROOT, parsed, pods, read_env, twins

from router.discovery import parse_services

DOCKER, SYSTEMD = DEPLOY / "docker", DEPLOY / "systemd"
DOCKERFILE = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ")
UNITS = sorted(SYSTEMD.glob("*.service"))
EXAMPLES = {path.name.split(".")[0]: read_env(path) for path in SYSTEMD.glob("*.example")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ANALYZE = shutil.which("systemd-analyze")


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} +(.*)$", DOCKERFILE, re.MULTILINE)


def test_the_image_has_all_packages_and_known_extras():
    copied = {
        source
        for line in instructions("COPY")
        if "--from" not in line
        for source in shlex.split(line)[:-1]
    }
    assert all((ROOT / source).exists() for source in copied)
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert copied >= {*packages, "pyproject.toml", "constraints.txt"}
    allowed = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in allowed if line.startswith("!")} == copied
    extras = PROJECT["project"]["optional-dependencies"]
    chosen = re.findall(r"EXTRAS=([\w,]+)", DOCKERFILE)
    assert len(chosen) == 2  # for CPUs, and in the comment for GPUs
    assert all(set(text.split(",")) <= extras.keys() for text in chosen)
    assert {"kubernetes", "nixl", "redis"} <= set(chosen[1].split(","))
    pinned = (ROOT / "constraints.txt").read_text()
    assert all(f"\n{name}==" in pinned for name in ("torch", "xgrammar", "apache-tvm-ffi"))


def test_the_image_runs_as_the_user_of_the_pods():
    (user,) = instructions("USER")
    (ports,) = instructions("EXPOSE")
    assert instructions("ENTRYPOINT") == ['["tini", "--", "microserve"]']
    for one in pods():
        pod = one["spec"]["template"]["spec"]
        context = pod["securityContext"]
        assert user == f"{context['runAsUser']}:{context['runAsGroup']}"
        (container,) = pod["containers"]
        assert str(container["ports"][0]["containerPort"]) in ports.split()
        assert "HOME=/home/microserve" in DOCKERFILE
        assert "/home/microserve" in {m["mountPath"] for m in container["volumeMounts"]}


def test_the_compose_file():
    made = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    ids, addresses = set(), set()
    for name, one in made["services"].items():
        if name == "redis":
            continue
        given = {k: re.sub(r"\$\{\w+:[-?].*\}", "secret", v) for k, v in one["environment"].items()}
        assert given.keys() <= twins() | NOT_OF_FLAGS
        command = [re.sub(r"\$\{MODEL:-(\w+)\}", r"\1", word) for word in one["command"]]
        values = parsed(command, given)
        stops = int(one["stop_grace_period"].removesuffix("s"))
        assert stops > (values.get("drain_s") or values["shutdown_s"]) + 5
        assert one["read_only"] and one["cap_drop"] == ["ALL"]
        if name == "router":
            router, port = name, values["port"]
            assert one["ports"] == [f"127.0.0.1:{port}:{port}"] and str(port) in str(
                one["healthcheck"]
            )
        else:
            assert values["router"] == f"http://{router}:{port}"
            assert values["host"] == one["networks"]["fleet"]["ipv4_address"]
            ids.add(values["engine_id"])
            addresses.add(values["host"])
    assert len(ids) == len(addresses) == 2
    build = made["services"]["router"]["build"]
    assert (DOCKER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).exists()


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units(unit):
    text = unit.read_text()
    (command,) = re.findall(r"^ExecStart=(\S+) (.*)$", text, re.MULTILINE)
    kind = unit.name.removeprefix("microserve-").split(".")[0].rstrip("@")
    given = EXAMPLES[kind]
    assert {name for name in given if name.startswith("MICROSERVE")} <= twins() | NOT_OF_FLAGS
    words = [word.replace("${MODEL}", given.get("MODEL", "")) for word in command[1].split()]
    values = parsed(words, given)
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert int(stop) > (values.get("drain_s") or values["shutdown_s"]) + 5
    assert "KillMode=mixed" in text  # a second SIGTERM would end what runs
    assert f"EnvironmentFile=/etc/microserve/{kind}.env" in text


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
def test_systemd_understands_the_units(tmp_path):
    """Only the program is missing here."""
    for unit in UNITS:
        text = re.sub(
            r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE
        )
        (tmp_path / unit.name).write_text(text)
    files = sorted(tmp_path.glob("*.service"))
    told = subprocess.run([ANALYZE, "verify", *files], capture_output=True, text=True)
    assert (told.returncode, told.stderr) == (0, "")
    files[0].write_text(files[0].read_text() + "Colour=blue\n")
    told = subprocess.run([ANALYZE, "verify", *files], capture_output=True, text=True)
    assert "Colour" in told.stderr


def test_values_of_discover_are_what_the_router_reads():
    assert parse_services("k8s:///microserve-any").selector == (
        "kubernetes.io/service-name in (microserve-any)"
    )

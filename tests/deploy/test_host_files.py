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
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from router.discovery import parse_services

DOCKER, SYSTEMD = DEPLOY / "docker", DEPLOY / "systemd"
DOCKERFILE = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ")
UNITS = sorted(SYSTEMD.glob("*.service"))
EXAMPLES = {path.name.split(".")[0]: read_env(path) for path in SYSTEMD.glob("*.example")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ANALYZE = shutil.which("systemd-analyze")


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} +(.*)$", DOCKERFILE, re.MULTILINE)


COPIED = [
    ROOT / source
    for line in instructions("COPY")
    if "--from" not in line
    for source in shlex.split(line)[:-1]
]
# Build arguments of the two images: the defaults, and what the comment at the top gives for GPUs.
# The comment's lines end in a backslash too, so that DOCKERFILE has them as one.
CPU = dict(re.findall(r"^ARG (\w+)=(\S*)$", DOCKERFILE, re.MULTILINE))
IMAGES = {"cpu": CPU, "vllm": CPU | dict(re.findall(r"--build-arg (\w+)=(\S+)", DOCKERFILE))}
# What vLLM 0.32.0 requires beyond this project, from its metadata, where pins have contradicted it.
VLLM = [
    "torch==2.13.0", "transformers<5.20.0,>=5.16.1", "fastapi<0.137.0,>=0.133.0", "numba==0.65.0",
    "apache-tvm-ffi==0.1.11", "xgrammar==0.2.8", "starlette>=1.0.1", "tokenizers>=0.23.2",
    "huggingface-hub>=1.31.0", "msgspec", "aiohttp>=3.14.3",
]  # fmt: skip


def test_the_image_has_all_packages_and_known_extras():
    copied = {str(path.relative_to(ROOT)) for path in COPIED}
    assert all((ROOT / source).exists() for source in copied)
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert copied >= {*packages, "pyproject.toml", "constraints.txt"}
    allowed = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in allowed if line.startswith("!")} == copied
    extras = PROJECT["project"]["optional-dependencies"]
    chosen = [arguments["EXTRAS"].split(",") for arguments in IMAGES.values()]
    assert all(set(names) <= extras.keys() for names in chosen)
    assert all({"kubernetes", "nixl", "redis"} <= set(names) for names in chosen)


@pytest.mark.parametrize("image", IMAGES)
def test_versions_of_the_image_are_what_its_packages_require(image: str):
    """The names that `pip` is given are pinned, and no pin contradicts a requirement."""
    arguments = IMAGES[image]
    (path,) = [path for path in COPIED if path.name == arguments["CONSTRAINTS"]]
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", path.read_text(), re.MULTILINE))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    project = PROJECT["project"]
    required = [*project["dependencies"], *(VLLM if image == "vllm" else [])]
    for extra in arguments["EXTRAS"].split(","):
        required += project["optional-dependencies"][extra]
    for text in [*required, "torch", "xgrammar", "apache-tvm-ffi"]:
        requirement = Requirement(text)
        version = pins[canonicalize_name(requirement.name)]
        assert version in requirement.specifier, f"{text}, but {path.name} has {version}"
    assert all('--constraint "$CONSTRAINTS"' in line for line in pip_commands())
    assert ("g++" in arguments["COMPILER"]) == (image == "vllm")  # for Triton, at run time
    assert "install --yes --no-install-recommends tini $COMPILER" in DOCKERFILE


def pip_commands() -> list[str]:
    found = re.findall(r"pip install [^&\n]*", DOCKERFILE)
    assert len(found) == 3
    return found


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

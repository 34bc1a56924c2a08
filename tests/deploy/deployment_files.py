"""The files of deploy/, parsed, and what the command line knows of the settings in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import click
import click.testing
import yaml

from router.cli import cli

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
VALUES = KUBERNETES / "components/autoscaling/prometheus-adapter-values.yaml"
KUSTOMIZATIONS = sorted(KUBERNETES.rglob("kustomization.yaml"))
MANIFESTS = sorted({*KUBERNETES.rglob("*.yaml")} - {*KUSTOMIZATIONS, VALUES})
PODS = ("Deployment", "StatefulSet")
NOT_OF_FLAGS = {"MICROSERVE_SECRET"}
Document = dict[str, Any]


@cache
def documents() -> list[Document]:
    """Return all objects of all manifests."""
    return [one for path in MANIFESTS for one in yaml.safe_load_all(path.read_text())]


def of_kind(*kinds: str) -> Iterator[Document]:
    return (one for one in documents() if one["kind"] in kinds)


def name_of(one: Document) -> str:
    return f"{one['kind']}/{one['metadata']['name']}"


def pods() -> list[Document]:
    """Return the workloads that run our image."""
    return [one for one in of_kind(*PODS) if container_of(one)["image"] == "microserve"]


def container_of(one: Document) -> Document:
    (container,) = one["spec"]["template"]["spec"]["containers"]
    return container


def read_env(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and line[0] != "#"]
    return dict(line.split("=", 1) for line in lines)


def config_map(name: str) -> dict[str, str]:
    """Return what the base puts into a ConfigMap."""
    made = yaml.safe_load((KUBERNETES / "base/kustomization.yaml").read_text())
    (files,) = [one["envs"] for one in made["configMapGenerator"] if one["name"] == name]
    return {k: v for file in files for k, v in read_env(KUBERNETES / "base" / file).items()}


def literals() -> dict[str, str]:
    """Return what components and overlays put into ConfigMaps besides."""
    found = {}
    for path in KUSTOMIZATIONS:
        for one in yaml.safe_load(path.read_text()).get("configMapGenerator", ()):
            found |= dict(text.split("=", 1) for text in one.get("literals", ()))
    return found


def environment(
    container: Document,
    *,
    fields: Mapping[str, str],
    secrets: Mapping[str, str],
    changes: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment that a kubelet gives a container.

    `fields` are values of pod fields and resources. A key that `secrets` lacks must be optional.
    `changes` are made to the ConfigMaps.
    """
    found: dict[str, str] = {}
    for one in container["envFrom"]:
        found |= config_map(one["configMapRef"]["name"])
    found |= changes or {}
    for one in container["env"]:
        source = one["valueFrom"]
        if (secret := source.get("secretKeyRef")) is not None:
            assert secret["name"] == "microserve-keys"
            if secret["key"] in secrets:
                found[one["name"]] = secrets[secret["key"]]
            else:
                assert secret.get("optional"), one
        elif (field := source.get("fieldRef")) is not None:
            found[one["name"]] = fields[field["fieldPath"]]
        else:
            resource = source["resourceFieldRef"]["resource"]
            found[one["name"]] = _resource(container, resource)
    return found


def _resource(container: Document, path: str) -> str:
    kind, _, name = path.partition(".")
    return str(container["resources"][kind][name])


def arguments(container: Document, environment: Mapping[str, str]) -> list[str]:
    """Return the arguments, with `$(NAME)` expanded as a kubelet does."""

    def value(match: re.Match[str]) -> str:
        return environment[match[1]]

    return [re.sub(r"\$\((\w+)\)", value, text) for text in container["args"]]


@cache
def twins() -> frozenset[str]:
    """Return the variables that stand for flags of `microserve engine` and `router`."""
    return frozenset(
        f"MICROSERVE_{name}_{parameter.name}".upper()
        for name in ("engine", "router")
        for parameter in cli.get_command(click.Context(cli), name).params
        if isinstance(parameter, click.Option)
    )


def parsed(args: list[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Parse a command line of `microserve` with these variables; return its parameters."""
    command = cli.get_command(click.Context(cli), args[0])
    prefix = f"MICROSERVE_{args[0]}_".upper()
    with_variables = click.testing.CliRunner(env=dict(environment))
    with with_variables.isolation(env=dict(environment)):
        context = command.make_context(
            args[0], list(args[1:]), auto_envvar_prefix=prefix.rstrip("_")
        )
    return context.params

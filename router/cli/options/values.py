"""Values of options: numbers with bounds, names of strategies, parameters, flags in one text."""

from __future__ import annotations

import json
import math
import shlex
import ssl
from collections.abc import Collection
from importlib.metadata import entry_points
from typing import Any
from urllib.parse import urlsplit

import click
from click.shell_completion import CompletionItem

from engine.protocol import BadRequest
from router.base import client_context

__all__ = [
    "CA_HELP",
    "ModelName",
    "Number",
    "ServerUrl",
    "StrategyName",
    "read_ca",
    "read_params",
    "split_flags",
    "with_vllm_flags",
]

CA_HELP = "CA certificates (PEM) of an https server; empty: the system's"
ALIASES = ("smollm2", "tiny", "mock")  # of models


class Number(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """A number from `least` to `most`; NaN is none."""

    def __init__(
        self, kind: type[int] | type[float], least: float | None = None, most: float | None = None
    ) -> None:
        self.name = "integer" if kind is int else "float"
        self.kind = kind
        self.least = -math.inf if least is None else least
        self.most = math.inf if most is None else most

    @property
    def bounds(self) -> str:
        """What a number must be, in words."""
        if self.most < math.inf:
            return f"from {self.least:.12g} to {self.most:.12g}"
        return f"{self.least:.12g} or more"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | float:
        try:
            number = self.kind(value)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is not a valid {self.name}.", param, ctx)
        if not self.least <= number <= self.most:
            self.fail(f"{value} is not {self.bounds}.", param, ctx)
        return number


class ServerUrl(click.ParamType):  # type: ignore[type-arg]  # as above
    """The address of an HTTP server."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parts = urlsplit(str(value))
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            good = False
        if not good:
            self.fail(f"{value!r} is not of the form http://HOST:PORT or https://HOST.", param, ctx)
        return str(value)


class ModelName(click.ParamType):  # type: ignore[type-arg]  # as above
    """A model's alias, folder, .gguf file or hub id. Shells complete aliases and paths."""

    name = "model"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        found = [CompletionItem(name) for name in ALIASES if name.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type="file")]


class StrategyName(click.ParamType):  # type: ignore[type-arg]  # as above
    """The name of a strategy, or the path of a .py file. Shells complete both."""

    name = "strategy"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        names = sorted(entry_points(group="microserve.strategies").names)
        found = [CompletionItem(name) for name in names if name.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type="file")]


def read_ca(file: str) -> ssl.SSLContext | None:
    """Return the TLS context for the value of `--ca`; `None` if it is empty.

    Raises `BadParameter`.
    """
    try:
        return client_context(file)
    except BadRequest as error:
        raise click.BadParameter(error.message, param_hint="--ca") from None


def read_params(pairs: Collection[str]) -> dict[str, Any]:
    """Parse `K=V` pairs. A V that is valid JSON is parsed as such; any other V is a string.

    Raises `BadParameter` for a pair of another form.
    """
    params = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{pair!r} is not of the form K=V", param_hint="--param")
        try:
            params[name] = json.loads(value)
        except ValueError:
            params[name] = value
    return params


def split_flags(option: str, text: str) -> tuple[str, ...]:
    """Return the arguments that a text has, as a shell would. Raises `click.UsageError`."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise click.UsageError(f"{option} {text!r}: {error}") from None


def with_vllm_flags(flags: dict[str, Any], extra: tuple[str, ...]) -> dict[str, Any]:
    """Return an engine's flags with the arguments behind a lone `--`, which vLLM gets.

    Raises `click.UsageError` if another engine would get them.
    """
    if (extra or flags["vllm_args"]) and flags["backend"] != "vllm":
        raise click.UsageError("arguments for vLLM need --backend vllm")
    given = f"{flags['vllm_args']} {shlex.join(extra)}".strip()
    return {**flags, "vllm_args": given}

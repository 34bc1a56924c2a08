"""The options that say when a request is served well enough, of `simulate` and `plan placement`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from router.cli.options import Number, option
from router.cli.workload_options import POSITIVE
from router.simulation import TARGET

__all__ = ["goodput_options"]

F = TypeVar("F", bound=Callable[..., Any])


def goodput_options(joint: str, *, least: float, required: bool) -> Callable[[F], F]:
    """Return a decorator that adds the options of the group Goodput.

    `joint` is the help of `--slo`, `least` the smallest `--slo-target`. `required`: both objectives
    have to be given.
    """
    options = [
        option("--slo-ttft-ms", type=POSITIVE, required=required, group="Goodput",
               help="objective for the time to first token (ms)"),
        option("--slo-tpot-ms", type=POSITIVE, required=required, group="Goodput",
               help="objective for the time per output token after the first (ms)"),
        option("--slo", type=click.Choice(["joint", "separate"]), default="joint",
               show_default=True, group="Goodput", help=joint),
        option("--slo-scale", type=POSITIVE, default=1.0, show_default=True, group="Goodput",
               help="factor on both objectives; below 1 is stricter"),
        option("--slo-target", type=Number(float, least, 1.0), default=TARGET, show_default=True,
               group="Goodput", help="share of requests that shall attain them"),
    ]  # fmt: skip

    def add(command: F) -> F:
        for each in reversed(options):
            command = each(command)
        return command

    return add

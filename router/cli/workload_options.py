"""The options that commands with a workload share: its requests, and its objectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from router.cli.options import Number, option
from router.workload import ARRIVALS, WORKLOADS, Workload, WorkloadConfig, open_workload

__all__ = ["POSITIVE", "config_of", "goodput_options", "workload_of", "workload_options"]

POSITIVE = Number(float, 1e-9, 1e12)
CV = Number(float, 0.01, 100.0)
F = TypeVar("F", bound=Callable[..., Any])


def workload_options(*others: str) -> Callable[[F], F]:
    """Return a decorator that adds the options that `workload_of` reads, and `--requests`.

    `others` are further names that `--workload` has in this command.
    """
    names = "|".join((*WORKLOADS, *others, "FILE"))
    options = [
        option("--workload", default="fixed", show_default=True, metavar=names, group="Workload",
               help="kind of requests, or a file: a trace (Mooncake's, Azure's or a router's "
               "recording) or request bodies"),
        option("--input", "input_", type=click.IntRange(1), group="Workload",
               help="prompt tokens per request  "
               "[default: 256; paper: 3000; long: 4096; prefix-sharing: 128 new ones per turn]"),
        option("--output", type=click.IntRange(1), group="Workload",
               help="output tokens per request  [default: 64; paper: 100; prefix-sharing: 128]"),
        option("--scale", type=POSITIVE, default=1.0, show_default=True, group="Workload",
               help="trace: factor for all lengths"),
        option("--requests", type=click.IntRange(1), group="Workload",
               help="number of requests  [default: 100; a trace: all]"),
        option("--seed", type=int, default=0, show_default=True, group="Workload",
               help="seed of lengths, tokens and arrival times"),
        option("--arrivals", type=click.Choice(ARRIVALS), default="poisson", show_default=True,
               group="Arrivals", help="open loop: distribution of arrivals"),
        option("--cv", type=CV, default=1.0, show_default=True, group="Arrivals",
               help="gamma arrivals: deviation of the times between them, over their mean; "
               "1 is poisson, more comes in bursts"),
        option("--speed", type=POSITIVE, default=1.0, show_default=True, group="Arrivals",
               help="trace: factor by which arrivals are faster"),
    ]  # fmt: skip
    return _all_of(options)


def goodput_options(joint: str, *, least: float, target: float, required: bool) -> Callable[[F], F]:
    """Return a decorator that adds the options of the group Goodput.

    `joint` is the help of `--slo`, `least` the smallest `--slo-target` and `target` its default.
    `required`: both objectives have to be given.
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
        option("--slo-target", type=Number(float, least, 1.0), default=target, show_default=True,
               group="Goodput", help="share of requests that shall attain them"),
    ]  # fmt: skip
    return _all_of(options)


def _all_of(options: list[Callable[[F], F]]) -> Callable[[F], F]:
    """Return a decorator that adds all options, in their order."""

    def add(command: F) -> F:
        for each in reversed(options):
            command = each(command)
        return command

    return add


def workload_of(values: dict[str, Any]) -> Workload:
    """Return the workload that the values of these options and of `rate` describe.

    Raises `BadRequest`.
    """
    return open_workload(config_of(values))


def config_of(values: dict[str, Any]) -> WorkloadConfig:
    """Return what the values of these options and of `rate` say of a workload."""
    names = ("seed", "output", "rate", "arrivals", "cv", "speed", "scale")
    return WorkloadConfig(
        name=values["workload"],
        input=values["input_"],
        **{name: values[name] for name in names},
    )

"""The command line: `microserve up | engine | router | chat | strategy | bench | config | …`."""

from __future__ import annotations

import click

from router.base import PREFIX, drop_service_links, hide_keys
from router.cli.advise import advise
from router.cli.bench import bench
from router.cli.chat import chat
from router.cli.completion import completion
from router.cli.config import config_group
from router.cli.on_ray import down, scale, status
from router.cli.options import CONTEXT
from router.cli.plan import plan
from router.cli.profile import profile
from router.cli.saved import trace, traffic
from router.cli.serve import engine, router
from router.cli.simulate import simulate
from router.cli.strategy import strategy
from router.cli.top import top
from router.cli.up import up

__all__ = ["main"]


@click.group(context_settings=CONTEXT)
@click.version_option(package_name="microserve")
def cli() -> None:
    """A programmable router over LLM microserving engines."""


for command in (
    up,
    engine,
    router,
    chat,
    strategy,
    bench,
    profile,
    plan,
    simulate,
    traffic,
    trace,
    top,
    advise,
    status,
    scale,
    down,
    config_group(up),
    completion,
):
    cli.add_command(command)


def main() -> None:
    """Run the console script. Each flag can also be set by `MICROSERVE_<COMMAND>_<FLAG>`."""
    drop_service_links()
    hide_keys()
    cli(prog_name="microserve", auto_envvar_prefix=PREFIX)

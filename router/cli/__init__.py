"""The command line: `microserve up | engine | router | chat | strategy | bench | config | …`."""

from __future__ import annotations

import click

from router.base import PREFIX, drop_service_links, hide_keys
from router.cli.options import CONTEXT, LazyGroup

__all__ = ["main"]

COMMANDS = {
    "up": "up:up",
    "engine": "serve:engine",
    "router": "serve:router",
    "chat": "on_router.chat:chat",
    "strategy": "on_router.strategy:strategy",
    "bench": "bench:bench",
    "profile": "profile:profile",
    "plan": "plan:plan",
    "simulate": "simulate:simulate",
    "traffic": "on_router.traffic:traffic",
    "trace": "on_router.trace:trace",
    "top": "on_router.top:top",
    "advise": "on_router.advise:advise",
    "status": "on_ray:status",
    "scale": "on_ray:scale",
    "down": "on_ray:down",
    "config": "up:config",
    "completion": "completion:completion",
}


@click.group(
    cls=LazyGroup,
    lazy={name: f"{__name__}.{where}" for name, where in COMMANDS.items()},
    context_settings=CONTEXT,
)
@click.version_option(package_name="microserve")
def cli() -> None:
    """A programmable router over LLM microserving engines."""


def main() -> None:
    """Run the console script. Each flag can also be set by `MICROSERVE_<COMMAND>_<FLAG>`."""
    drop_service_links()
    hide_keys()
    cli(prog_name="microserve", auto_envvar_prefix=PREFIX)

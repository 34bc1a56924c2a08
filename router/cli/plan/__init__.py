"""`microserve plan`: how many engines of which parallelism, before any is started."""

from __future__ import annotations

import click

from router.cli.options import CONTEXT
from router.cli.plan.pipeline import pipeline
from router.cli.plan.placement import placement

__all__ = ["plan"]


@click.group(context_settings=CONTEXT)
def plan() -> None:
    """Plan engines for a workload, as DistServe and DéjàVu do."""


plan.add_command(placement)
plan.add_command(pipeline)

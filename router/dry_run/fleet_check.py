"""Whether the engines of a router support what a strategy calls."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from router.base import child_environment
from router.dry_run.dry_run_process import Problem, Tried, dry_run_source, tried_source
from router.dry_run.fleet_engine import differ, fleet_engines
from router.engines import Registry
from router.rollout import Catalog
from router.strategy import Bound

__all__ = ["check_on_fleet", "check_source"]


async def check_on_fleet(
    bound: Bound, registry: Registry, catalog: Catalog, *, own_file: str = ""
) -> list[str]:
    """Run a strategy dry on virtual engines like those that are up, before it becomes active.

    Returns the fallbacks that its requests take there. Takes no time, and returns none, if the
    engines support everything and exchange KV: each strategy has passed a dry run on such engines.
    A strategy from `own_file` has this process's environment. Raises `Unsupported`, with the call
    and the engines that lack it, and `BadRequest` for other failures.
    """
    engines = fleet_engines(registry)
    if not differ(engines):
        return []
    name = bound.strategy.name
    source, file = catalog.source(name)
    own = not source or file == own_file
    tried = await dry_run_source(
        source,
        name=name,
        file=file,
        folder=Path(file).parent if source and own else None,
        params=bound.shown,
        engines=engines,
        environment=child_environment() if own else None,
    )
    return tried.fallbacks


async def check_source(
    source: str, registry: Registry, *, name: str = "", file: str = "", params: Mapping[str, Any]
) -> Tried | Problem:
    """Run a source dry that is not loaded, on engines like those that are up.

    Arguments as of `dry_run_source`. The process ends with the check.
    """
    engines = fleet_engines(registry)
    return await tried_source(
        source,
        name=name,
        file=file,
        params=params,
        engines=engines if differ(engines) else (),
    )

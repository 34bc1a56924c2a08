"""What the confined process of a dry run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.protocol import MicroserveError
from router.base import import_from
from router.dry_run.dry_run import dry_run
from router.dry_run.fleet_engine import FleetEngine
from router.rollout import Catalog

__all__ = ["try_out"]

MESSAGE_CHARACTERS = 4000


def try_out(job: dict[str, Any]) -> dict[str, Any]:
    """Load the strategy of a job and run it dry.

    The job has `source`, `name`, `file`, `folder`, `params` and `engines`. Returns `name`,
    `requests` and `fallbacks`, or `error`.
    """
    source, name, file = job["source"], job["name"], job["file"]
    for folder in (Path(), Path(job["folder"])):
        import_from(folder.absolute())
    try:
        catalog = Catalog()
        strategy = catalog.load(source, name=name, file=file) if source else catalog[name]
        engines = [FleetEngine(**each) for each in job["engines"]]
        fallbacks: set[str] = set()
        requests = dry_run(strategy.bind(job["params"]), engines, fallbacks)
        return {"name": strategy.name, "requests": requests, "fallbacks": sorted(fallbacks)}
    except MicroserveError as error:
        message, param = error.message[:MESSAGE_CHARACTERS], error.param or "source"
        return {"error": {"type": error.type, "message": message, "param": param}}

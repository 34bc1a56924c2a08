"""What the confined process of a dry run does."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from engine.protocol import MicroserveError, Unsupported
from router.base import import_from
from router.dry_run.dry_run import DryRunFailed, dry_run
from router.dry_run.fleet_engine import FleetEngine
from router.rollout import Catalog, Place, SourceError
from router.strategy import Strategy

__all__ = ["try_out"]

MESSAGE_CHARACTERS, DOC_CHARACTERS, SCHEMA_BYTES = 4000, 4000, 24_000


def try_out(job: dict[str, Any]) -> dict[str, Any]:
    """Load the strategy of a job and run it dry.

    The job has `source`, `name`, `file`, `folder`, `params` and `engines`. Returns `name`, `doc`,
    `params` (their schemas), `requests` and `fallbacks`, or `error`.
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
        return {**_described(strategy), "requests": requests, "fallbacks": sorted(fallbacks)}
    except MicroserveError as error:
        message, param = error.message[:MESSAGE_CHARACTERS], error.param or "source"
        kind, place = _fault(error, file or f"<strategy {name}>")
        told = {"type": error.type, "message": message, "param": param}
        return {"error": {**told, "kind": kind, "place": asdict(place)}}


def _described(strategy: Strategy) -> dict[str, Any]:
    """Return its name, help and parameters; no parameters if they take too much space."""
    schemas = orjson.dumps(strategy.describe()["params"])  # with `null` for infinite numbers
    params = orjson.loads(schemas) if len(schemas) <= SCHEMA_BYTES else {}
    return {"name": strategy.name, "doc": strategy.doc[:DOC_CHARACTERS], "params": params}


def _fault(error: MicroserveError, where: str) -> tuple[str, Place]:
    """Return what is wrong, in a word, and where."""
    if isinstance(error, SourceError):
        return error.kind, error.place
    if isinstance(error, Unsupported):
        return "unsupported", Place()
    if isinstance(error, DryRunFailed):  # its message names the line
        found = re.search(rf"\({re.escape(Path(where).name)}:(\d{{1,6}})\)", error.message)
        return "rule", Place(int(found[1]) if found else None)
    return "params" if (error.param or "").startswith("params") else "load", Place()

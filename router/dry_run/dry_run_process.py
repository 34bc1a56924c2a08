"""Runs the dry run of a strategy in a process of its own, before the router or `up` imports it.

Whatever the strategy does when it is imported or run, its processes end with the dry run, and their
output, time and memory are bounded (`router.confinement`). That is not a sandbox: see "What an
upload may do" in docs/strategies.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.protocol import BadRequest, Unsupported
from router.base import child_environment
from router.confinement import run_confined
from router.dry_run.fleet_engine import FleetEngine
from router.rollout import read_source

__all__ = ["dry_run_source", "dry_run_strategy"]

TIMEOUT_S = 30.0
ENTRY = "router.dry_run.worker:try_out"


async def dry_run_source(
    source: str,
    *,
    name: str = "",
    file: str = "",
    folder: Path | None = None,
    params: Mapping[str, Any] | None = None,
    engines: Sequence[FleetEngine] = (),
    timeout_s: float = TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
    namespaces: bool = True,
) -> dict[str, Any]:
    """Load `source` and run it dry with `params`; `name` and `file` as in `Catalog.load`.

    Without `source` it runs the installed strategy `name`. The source may import modules from the
    current folder, and from `folder`. The virtual engines are like `engines`; without these, they
    support everything. `environment` and `namespaces` as of `run_confined`.

    Returns `{"name", "requests", "fallbacks"}`. Raises `BadRequest`, which says what is wrong and
    where, and `Unsupported` for a call that the engines lack. Cancellation ends the process.
    """
    where = file or name
    job = {
        "source": source, "name": name, "file": file, "folder": str(folder) if folder else ".",
        "params": dict(params or {}), "engines": [asdict(engine) for engine in engines],
    }  # fmt: skip
    ended = await run_confined(
        ENTRY, job, timeout_s=timeout_s, environment=environment, namespaces=namespaces
    )
    result = ended.verdict
    if not _is_verdict(result):
        if ended.exitcode is None:
            message = f"{where}: it did not get through a dry run in {timeout_s:g} s"
        else:
            message = f"{where}: it ended its process ({ended.exitcode}): {ended.tail}"
        raise BadRequest(message, param="source")
    if error := result.get("error"):
        kind = Unsupported if error["type"] == Unsupported.type else BadRequest
        raise kind(error["message"], param=error["param"])
    return {name: result[name] for name in ("name", "requests", "fallbacks")}


async def dry_run_strategy(
    strategy: str, params: Mapping[str, Any], engines: Sequence[FleetEngine] = ()
) -> dict[str, Any]:
    """Run an installed strategy dry, or the one in a file if `strategy` ends in `.py`.

    It is the caller's own code, so it has the caller's environment.
    """
    environment = child_environment()
    if not strategy.endswith(".py"):
        return await dry_run_source(
            "", name=strategy, params=params, engines=engines, environment=environment
        )
    path = Path(strategy)
    return await dry_run_source(
        read_source(path), file=strategy, folder=path.parent, params=params, engines=engines,
        environment=environment,
    )  # fmt: skip


def _is_verdict(result: Any) -> bool:
    """Return whether the module has not replaced the verdict by something of another shape."""
    if not isinstance(result, dict):
        return False
    if error := result.get("error"):
        return isinstance(error, dict) and all(
            isinstance(error.get(key), str) for key in ("type", "message", "param")
        )
    fallbacks = result.get("fallbacks")
    return (
        isinstance(result.get("name"), str)
        and type(result.get("requests")) is int
        and isinstance(fallbacks, list)
        and all(isinstance(each, str) for each in fallbacks)
    )

"""Runs the dry run of a strategy in a process of its own, before the router or `up` imports it.

Whatever the strategy does when it is imported or run, its processes end with the dry run, and their
output, time and memory are bounded (`router.confinement`). That is not a sandbox: see "What an
upload may do" in docs/strategies.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec

from engine.protocol import BadRequest, Unsupported
from router.base import child_environment
from router.confinement import run_confined
from router.dry_run.fleet_engine import FleetEngine
from router.rollout import read_source

__all__ = ["Problem", "Tried", "dry_run_source", "dry_run_strategy", "tried_source"]

TIMEOUT_S = 30.0
ENTRY = "router.dry_run.worker:try_out"

Number = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class Tried(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A strategy that has got through a dry run, with the JSON schemas of its parameters.

    `fallbacks` are those that its requests took on the fleet's engines.
    """

    name: str
    doc: str
    params: dict[str, dict[str, Any]]
    requests: int
    fallbacks: list[str]


class Where(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `router.rollout.Place`, told by a process that may tell anything."""

    line: Number | None = None
    column: Number | None = None
    end_line: Number | None = None
    end_column: Number | None = None


class Problem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why it has not. `type` is that of the error, `param` the field that is at fault.

    `kind` is `syntax`, `load` (an error while it was loaded), `params`, `rule` (it broke a rule of
    strategies in the dry run), `unsupported` (it makes a call that the engines lack), `ended` (its
    process ended early), or `late`.
    """

    type: str
    message: str
    param: str
    kind: str
    place: Where


class _Refused(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    error: Problem


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
) -> Tried:
    """Load `source` and run it dry with `params`; `name` and `file` as in `Catalog.load`.

    Without `source` it runs the installed strategy `name`. The source may import modules from the
    current folder, and from `folder`. The virtual engines are like `engines`; without these, they
    support everything. `environment` and `namespaces` as of `run_confined`.

    Raises `BadRequest`, which says what is wrong and where, and `Unsupported` for a call that the
    engines lack. Cancellation ends the process.
    """
    tried = await tried_source(
        source, name=name, file=file, folder=folder, params=params, engines=engines,
        timeout_s=timeout_s, environment=environment, namespaces=namespaces,
    )  # fmt: skip
    if isinstance(tried, Problem):
        kind = Unsupported if tried.type == Unsupported.type else BadRequest
        raise kind(tried.message, param=tried.param)
    return tried


async def tried_source(
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
) -> Tried | Problem:
    """Do the same, but return what is wrong."""
    where = file or name
    job = {
        "source": source, "name": name, "file": file, "folder": str(folder) if folder else ".",
        "params": dict(params or {}), "engines": [asdict(engine) for engine in engines],
    }  # fmt: skip
    ended = await run_confined(
        ENTRY, job, timeout_s=timeout_s, environment=environment, namespaces=namespaces
    )
    if (found := _verdict(ended.verdict)) is not None:
        return found
    if ended.exitcode is None:
        message, kind = f"{where}: it did not get through a dry run in {timeout_s:g} s", "late"
    else:
        message = f"{where}: it ended its process ({ended.exitcode}): {ended.tail}"
        kind = "ended"
    return Problem(BadRequest.type, message, "source", kind, Where())


async def dry_run_strategy(
    strategy: str, params: Mapping[str, Any], engines: Sequence[FleetEngine] = ()
) -> Tried:
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


def _verdict(said: Any) -> Tried | Problem | None:
    """Return the verdict, unless the module has replaced it by something of another shape."""
    text = json.dumps(said, ensure_ascii=False).encode("utf-8", "replace")
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(text, type=Tried)
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(text, type=_Refused).error
    return None

"""Runs the dry run of a strategy in a process of its own, before the router or `up` imports it.

Whatever the strategy does when it is imported or run ends with that process. Its standard input is
the source, and its standard output the result, both as JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.protocol import BadRequest, MicroserveError
from router.base import child_environment
from router.rollout import Catalog, read_source
from router.simulation.dry_run import dry_run

__all__ = ["dry_run_source", "dry_run_strategy"]

TIMEOUT_S = 30.0
TAIL = 2000  # characters of standard error shown


async def dry_run_source(
    source: str,
    *,
    name: str = "",
    file: str = "",
    params: Mapping[str, Any] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Load `source` and run it dry with `params`; `name` and `file` as in `Catalog.load`.

    Without `source` it runs the installed strategy `name`. Returns `{"name", "requests"}`. Raises
    `BadRequest`, which says what is wrong and where. Cancellation kills the process.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router.simulation.dry_run_process",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, env=child_environment(), start_new_session=True,
    )  # fmt: skip
    job = {"source": source, "name": name, "file": file, "params": dict(params or {})}
    try:
        async with asyncio.timeout(timeout_s):
            out, errors = await process.communicate(json.dumps(job).encode())
    except TimeoutError:
        raise BadRequest(
            f"{file or name}: it did not get through a dry run in {timeout_s:g} s", param="source"
        ) from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and all processes that it started
        await process.wait()
    try:
        result: dict[str, Any] = json.loads(out)
    except ValueError:
        tail = errors.decode(errors="replace")[-TAIL:].strip()
        ending = f"ended its process ({process.returncode})"
        raise BadRequest(f"{file or name}: it {ending}: {tail}", param="source") from None
    if error := result.get("error"):
        raise BadRequest(error["message"], param=error["param"])
    return result


async def dry_run_strategy(strategy: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Run an installed strategy dry, or the one in a file if `strategy` ends in `.py`."""
    if not strategy.endswith(".py"):
        return await dry_run_source("", name=strategy, params=params)
    return await dry_run_source(read_source(Path(strategy)), file=strategy, params=params)


def main() -> None:
    """Run in the process: read the input, run, write the result."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the strategy prints is not the result
    logging.disable()
    job = json.load(sys.stdin)
    source, name, file = job["source"], job["name"], job["file"]
    result: dict[str, Any]
    try:
        catalog = Catalog()
        strategy = catalog.load(source, name=name, file=file) if source else catalog[name]
        requests = dry_run(strategy.bind(job["params"]))
        result = {"name": strategy.name, "requests": requests}
    except MicroserveError as error:
        result = {"error": {"message": error.message, "param": error.param or "source"}}
    json.dump(result, out)
    out.flush()
    os._exit(0)  # do not wait for threads and tasks of the strategy


if __name__ == "__main__":
    main()

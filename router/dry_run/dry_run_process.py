"""Runs the dry run of a strategy in a process of its own, before the router or `up` imports it.

Whatever the strategy does when it is imported or run, its processes end with the dry run, and their
output, time and memory are bounded (`guard`, `confinement`). That is not a sandbox: see "What an
upload may do" in docs/strategies.md.
"""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import Process
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.protocol import BadRequest
from router.base import bare_environment, child_environment, module_command
from router.rollout import read_source

__all__ = ["dry_run_source", "dry_run_strategy"]

TIMEOUT_S = 30.0
START_S = 30.0  # for the process to import the router, on a busy machine
END_S = 10.0  # for the process to end what it has started
TAIL = 2000  # characters of its output shown
REPORT_BYTES = 1 << 20


async def dry_run_source(
    source: str,
    *,
    name: str = "",
    file: str = "",
    folder: Path | None = None,
    params: Mapping[str, Any] | None = None,
    timeout_s: float = TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
    namespaces: bool = True,
) -> dict[str, Any]:
    """Load `source` and run it dry with `params`; `name` and `file` as in `Catalog.load`.

    Without `source` it runs the installed strategy `name`. The source may import modules from the
    current folder, and from `folder`. `environment` is the process's: by default only what Python
    needs, so no keys. Without `namespaces` it does not use the kernel's.
    Returns `{"name", "requests"}`. Raises `BadRequest`, which says what is wrong and where.
    Cancellation ends the process.
    """
    where = file or name
    job = {
        "source": source, "name": name, "file": file, "folder": str(folder) if folder else ".",
        "params": dict(params or {}), "timeout_s": timeout_s, "namespaces": namespaces,
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *module_command("router.dry_run.guard"),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, start_new_session=True,
        env=dict(bare_environment() if environment is None else environment),
    )  # fmt: skip
    try:
        async with asyncio.timeout(START_S + timeout_s + END_S):
            out, errors = await _ask(process, json.dumps(job).encode() + b"\n")
    except TimeoutError:
        raise _too_slow(where, timeout_s) from None
    finally:
        await _end(process)
    try:
        report: dict[str, Any] = json.loads(out)
    except ValueError:  # the guard has failed, or was killed by the module
        raise _ended(where, process.returncode, errors) from None
    result = report["verdict"]
    if not _is_verdict(result):
        if report["exitcode"] is None:
            raise _too_slow(where, timeout_s)
        raise _ended(where, report["exitcode"], report["tail"])
    if error := result.get("error"):
        raise BadRequest(error["message"], param=error["param"])
    return {"name": result["name"], "requests": result["requests"]}


async def dry_run_strategy(strategy: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Run an installed strategy dry, or the one in a file if `strategy` ends in `.py`.

    It is the caller's own code, so it has the caller's environment.
    """
    environment = child_environment()
    if not strategy.endswith(".py"):
        return await dry_run_source("", name=strategy, params=params, environment=environment)
    path = Path(strategy)
    return await dry_run_source(
        read_source(path), file=strategy, folder=path.parent, params=params, environment=environment
    )


async def _ask(process: Process, job: bytes) -> tuple[str, str]:
    """Write the job; return the process's report, and the end of its standard error."""
    if process.stdin is None:
        return "", ""
    with suppress(ConnectionError):  # it has failed already, and says why
        process.stdin.write(job)
        await process.stdin.drain()
    return await asyncio.gather(
        _tail(process.stdout, REPORT_BYTES), _tail(process.stderr, 4 * TAIL)
    )


async def _tail(stream: asyncio.StreamReader | None, most: int) -> str:
    """Read a stream to its end; return the last `most` bytes as text."""
    kept = b""
    while stream is not None and (piece := await stream.read(1 << 16)):
        kept = (kept + piece)[-most:]
    return kept.decode(errors="replace")


async def _end(process: Process) -> None:
    """End the guard, which ends the worker and its descendants when its input ends."""
    if process.stdin is not None:
        process.stdin.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await process.wait()
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _is_verdict(result: Any) -> bool:
    """Return whether the module has not replaced the verdict by something of another shape."""
    if not isinstance(result, dict):
        return False
    if error := result.get("error"):
        return isinstance(error, dict) and all(
            isinstance(error.get(key), str) for key in ("message", "param")
        )
    return isinstance(result.get("name"), str) and type(result.get("requests")) is int


def _too_slow(where: str, timeout_s: float) -> BadRequest:
    message = f"{where}: it did not get through a dry run in {timeout_s:g} s"
    return BadRequest(message, param="source")


def _ended(where: str, exitcode: int | None, said: str) -> BadRequest:
    tail = said[-TAIL:].strip()
    return BadRequest(f"{where}: it ended its process ({exitcode}): {tail}", param="source")

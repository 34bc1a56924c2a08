"""A confined process, seen from its caller: what it is given, and what came of it."""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import Process
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from router.base import bare_environment, module_command

__all__ = ["Ended", "run_confined"]

START_S = 30.0  # for the process to import the router, on a busy machine
END_S = 10.0  # for the process to end what it has started
TAIL = 2000  # characters of its output that are kept
VERDICT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Ended:
    """What came of a confined function.

    `verdict` is what it returned, as JSON; `None` if it did not get that far. User code may have
    replaced it by anything. `exitcode` is negative for a signal, and `None` if it took too long.
    """

    verdict: Any
    exitcode: int | None
    tail: str = ""  # the end of what it printed


async def run_confined(
    entry: str,
    job: Mapping[str, Any],
    *,
    timeout_s: float,
    cpu_s: float | None = None,
    nice: int = 0,
    environment: Mapping[str, str] | None = None,
    namespaces: bool = True,
    fds: Collection[int] = (),
    verdict_bytes: int = VERDICT_BYTES,
) -> Ended:
    """Call `entry` with `job` in a process of its own; both are JSON.

    `entry` is `MODULE:FUNCTION`. It may take `timeout_s` seconds, and `cpu_s` seconds of CPU time,
    by default as many. `environment` is by default only what Python needs, so it has no keys.
    Without `namespaces` it does not use the kernel's. The process inherits the descriptors `fds`,
    under their numbers. A result of more than `verdict_bytes` bytes of JSON is none, as the end of
    the output says then. Cancellation ends it, with all that it has started.
    """
    order = {
        "entry": entry, "job": dict(job), "timeout_s": timeout_s, "nice": nice,
        "cpu_s": (timeout_s if cpu_s is None else cpu_s) + 1, "namespaces": namespaces,
        "verdict_bytes": verdict_bytes,
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *module_command("router.confinement.guard"),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, start_new_session=True, pass_fds=tuple(fds),
        env=dict(bare_environment() if environment is None else environment),
    )  # fmt: skip
    try:
        async with asyncio.timeout(START_S + timeout_s + END_S):
            data = json.dumps(order).encode() + b"\n"
            # The tail of the output takes up to six bytes a character as JSON.
            out, errors = await _ask(process, data, verdict_bytes + (1 << 17))
    except TimeoutError:
        return Ended(None, None)
    finally:
        await _end(process)
    try:
        report: dict[str, Any] = json.loads(out)
    except ValueError:  # the guard has failed, or was killed by the user's code
        return Ended(None, process.returncode, errors[-TAIL:].strip())
    return Ended(report["verdict"], report["exitcode"], report["tail"][-TAIL:].strip())


async def _ask(process: Process, order: bytes, most: int) -> tuple[str, str]:
    """Write the order; return the process's report, of `most` bytes at most, and the end of its
    standard error."""
    if process.stdin is None:
        return "", ""
    with suppress(ConnectionError):  # it has failed already, and says why
        process.stdin.write(order)
        await process.stdin.drain()
    return await asyncio.gather(_tail(process.stdout, most), _tail(process.stderr, 4 * TAIL))


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

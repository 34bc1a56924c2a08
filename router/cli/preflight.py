"""Checks of the command line before anything starts: one line per mistake, exit code 2."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import click

from engine.protocol import MicroserveError
from router.base import StartFailed, root_cause, server_context
from router.conformance import ALL, run_checks, set_up
from router.dry_run import FleetEngine, dry_run_strategy
from router.server import listen
from router.store import RedisStore

__all__ = [
    "Mistake", "check_address", "check_folder", "check_store", "check_strategy", "check_tls",
]  # fmt: skip


class Mistake(click.ClickException):
    """The command line asks for something impossible."""

    exit_code = 2


def check_strategy(
    strategy: str, params: Mapping[str, Any], engines: Sequence[FleetEngine] = ()
) -> tuple[int, list[str]]:
    """Dry-run a strategy, given by name or file, on engines like `engines` if there are any.

    Returns the number of simulated requests, and what they fell back to. Raises `Mistake` if it
    cannot be loaded or fails.
    """
    try:
        tried = asyncio.run(dry_run_strategy(strategy, params, engines))
    except MicroserveError as error:
        raise Mistake(error.message) from None
    return tried.requests, tried.fallbacks


def check_conformance(
    strategy: str,
    params: Mapping[str, Any],
    *,
    model: str,
    only: Collection[str],
    backend: Literal["microserve", "vllm"] = "microserve",
    flags: Sequence[Sequence[str]] = (),
) -> bool:
    """Compare a strategy on real engines with a single engine, and print the result of each check.

    `backend` is what computes in the engines, and `flags` are further flags of the first ones,
    which the one that they are compared with does not get. `only` names the checks to run; empty:
    all. Returns whether all passed. Raises `Mistake` if the processes do not start.
    """
    checks = [check for check in ALL if not only or check.__name__ in only]

    async def run() -> bool:
        click.echo(f"starting engines with {model} …", err=True)
        failed, requests = 0, 0
        async with set_up(model, strategy, params, backend, flags) as (deployment, oracle):
            if not deployment.resumes:
                click.echo("answers that lose their engine are greedy: no others resume exactly")
            async for result in run_checks(deployment, oracle, checks):
                click.echo(str(result))
                failed += bool(result.problem)
                requests += result.requests
        verdict = f"{failed} of {len(checks)} checks failed" if failed else "ok"
        click.echo(f"{strategy}: {verdict}, {requests} requests to engines with {model}")
        return not failed

    try:
        return asyncio.run(run())
    except (StartFailed, ExceptionGroup) as error:
        cause = root_cause(error)
        if not isinstance(cause, StartFailed):
            raise
        raise Mistake(str(cause).strip().splitlines()[-1]) from None


def check_address(host: str, port: int) -> None:
    """Raise `Mistake` if the address cannot be listened on."""
    try:
        listen(host, port).close()
    except socket.gaierror as error:
        raise Mistake(f"--host {host}: {error.strerror}") from None
    except OSError as error:
        raise Mistake(f"--host {host} --port {port}: {error.strerror}") from None
    except OverflowError:
        raise Mistake(f"--port {port}: ports range from 0 to 65535") from None


def check_tls(cert: str, key: str) -> None:
    """Raise `Mistake` unless the files are a certificate and its key, or both names are empty."""
    try:
        server_context(cert, key)
    except MicroserveError as error:
        raise Mistake(error.message) from None


def check_store(url: str, password_file: str) -> None:
    """Raise `Mistake` if this is no URL of a store, or no file with a password."""
    if password_file and not url:
        raise Mistake("--store-password-file needs --store")
    try:
        if url:
            RedisStore(url, password_file=password_file)
    except MicroserveError as error:
        raise Mistake(error.message) from None


def check_folder(option: str, path: Path | None) -> None:
    """Raise `Mistake` if `path` is in no folder that can be written to."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise Mistake(f"{option} {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Mistake(f"{option} {path}: the folder {folder} cannot be written to")

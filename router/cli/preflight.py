"""Checks of the command line before anything starts: one line per mistake, exit code 2."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from engine.protocol import MicroserveError
from router.base import server_context
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

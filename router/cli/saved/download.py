"""Saving what a router sends, for the commands that do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import httpx

from router.cli.admin_client import problem_of, unreachable

__all__ = ["download"]

MOST_BYTES = 1 << 30
LONGEST_S = 600.0


def download(
    client: httpx.Client,
    path: str,
    params: dict[str, Any],
    output: Path,
    *,
    seen: Callable[[bytes], object] = lambda piece: None,
    complete: Callable[[], object] = lambda: None,
) -> int:
    """Save the router's answer to `GET path`; return its bytes.

    The file is replaced only by a whole answer, which is not too much and does not take too long.
    `seen` is called with each piece of it, and `complete` before the file is replaced, which it
    prevents by an exception. Raises `ClickException`.
    """
    # A device, such as /dev/stdout, cannot be replaced.
    direct = output.exists() and not output.is_file()
    file_path = output.resolve()  # a link stays
    partial = output if direct else file_path.with_name(f".{output.name}.{os.getpid()}")
    size, began = 0, time.monotonic()
    try:
        with client.stream("GET", path, params=params) as reply:
            if reply.is_error:
                reply.read()
                raise click.ClickException(problem_of(reply.json()))
            with partial.open("wb") as file:
                for piece in reply.iter_bytes():
                    size += len(piece)
                    if size > MOST_BYTES:
                        raise ValueError(f"the router sends more than {MOST_BYTES} bytes")
                    if time.monotonic() - began > LONGEST_S:
                        raise ValueError(f"the router's answer takes longer than {LONGEST_S:g} s")
                    file.write(piece)
                    seen(piece)
        complete()
        if not direct:
            partial.replace(file_path)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise unreachable(str(client.base_url), error) from None
    except OSError as error:
        raise click.ClickException(f"{output}: {error.strerror}") from None
    finally:
        if not direct:
            partial.unlink(missing_ok=True)
    return size

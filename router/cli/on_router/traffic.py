"""`microserve traffic`: save the recorded traffic of a router, for simulations."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import BinaryIO

import click
import httpx

from router.cli.on_router.admin_client import admin_client, admin_options, problem_of, unreachable
from router.cli.options import GroupedCommand, Number, option
from router.cli.preflight import check_folder

__all__ = ["traffic"]

MOST_BYTES = 1 << 30
LONGEST_S = 600.0


@click.command(cls=GroupedCommand)
@admin_options
@option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path),
        group="Traffic", help="file to write")  # fmt: skip
@option("--minutes", type=Number(float, 1e-3, 10_080.0), group="Traffic",
        help="of the latest minutes  [default: all that is kept]")  # fmt: skip
def traffic(url: str, admin_key: str, ca: str, output: Path, minutes: float | None) -> None:
    """Save the shape of a router's latest requests.

    A line of JSON each, in the order of arrival: time, lengths, and names of the prompt's first
    pages, which tell what prompts share. There is no text in it. `simulate` and `bench` take the
    file as --workload.
    """
    check_folder("--output", output)
    params = {} if minutes is None else {"minutes": minutes}
    # A device, such as /dev/stdout, cannot be replaced.
    direct = output.exists() and not output.is_file()
    file_path = output.resolve()  # a link stays
    partial = output if direct else file_path.with_name(f".{output.name}.{os.getpid()}")
    try:
        with (
            admin_client(url, admin_key, ca) as client,
            client.stream("GET", "/admin/traffic", params=params) as reply,
        ):
            if reply.is_error:
                reply.read()
                raise click.ClickException(problem_of(reply.json()))
            with partial.open("wb") as file:
                count = _save(reply, file)
        if not count:
            raise click.ClickException(f"{url}: no request has ended yet that is recent enough")
        if not direct:
            partial.replace(file_path)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise unreachable(url, error) from None
    except OSError as error:
        raise click.ClickException(f"{output}: {error.strerror}") from None
    finally:
        if not direct:
            partial.unlink(missing_ok=True)
    click.echo(json.dumps({"traffic": str(output), "requests": count}))


def _save(reply: httpx.Response, file: BinaryIO) -> int:
    """Write what the router sends; return the number of lines.

    Raises `ValueError` if it is too much or takes too long.
    """
    lines = size = 0
    began = time.monotonic()
    for piece in reply.iter_bytes():
        size += len(piece)
        if size > MOST_BYTES:
            raise ValueError(f"the router sends more than {MOST_BYTES} bytes")
        if time.monotonic() - began > LONGEST_S:
            raise ValueError(f"the router's answer takes longer than {LONGEST_S:g} s")
        file.write(piece)
        lines += piece.count(b"\n")
    return lines

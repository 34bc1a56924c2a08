"""`microserve traffic`: save the recorded traffic of a router, for simulations."""

from __future__ import annotations

import json
from pathlib import Path

import click
import httpx

from router.cli.admin_client import admin_client, admin_options, problem_of, unreachable
from router.cli.options import GroupedCommand, Number, option
from router.cli.preflight import check_folder

__all__ = ["traffic"]


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
    count = 0
    try:
        with (
            admin_client(url, admin_key, ca) as client,
            client.stream("GET", "/admin/traffic", params=params) as reply,
        ):
            if reply.is_error:
                reply.read()
                raise click.ClickException(problem_of(reply.json()))
            with output.open("wb") as file:
                for piece in reply.iter_bytes():
                    file.write(piece)
                    count += piece.count(b"\n")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise unreachable(url, error) from None
    except OSError as error:
        raise click.ClickException(f"{output}: {error.strerror}") from None
    if not count:
        output.unlink()
        raise click.ClickException(f"{url}: no request has ended yet that is recent enough")
    click.echo(json.dumps({"traffic": str(output), "requests": count}))

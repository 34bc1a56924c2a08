"""`microserve traffic`: save the recorded traffic of a router, for simulations."""

from __future__ import annotations

import json
from pathlib import Path

import click

from router.cli.admin_client import admin_client, admin_options
from router.cli.options import GroupedCommand, Number, option
from router.cli.preflight import check_folder
from router.cli.saved.download import download

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

    def seen(piece: bytes) -> None:
        nonlocal count
        count += piece.count(b"\n")

    def complete() -> None:
        if not count:
            message = f"{url}: no request has ended yet that is recent enough"
            raise click.ClickException(message)

    with admin_client(url, admin_key, ca) as client:
        download(client, "/admin/traffic", params, output, seen=seen, complete=complete)
    click.echo(json.dumps({"traffic": str(output), "requests": count}))

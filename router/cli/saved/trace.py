"""`microserve trace`: save what a fleet has done in the latest seconds, as a time line."""

from __future__ import annotations

import json
from pathlib import Path

import click

from engine.protocol import TIMELINE_S
from router.cli.admin_client import admin_client, admin_options
from router.cli.options import GroupedCommand, Number, option
from router.cli.preflight import check_folder
from router.cli.saved.download import download

__all__ = ["trace"]


@click.command(cls=GroupedCommand)
@admin_options
@option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path),
        group="Trace", help="file to write")  # fmt: skip
@option("--seconds", type=Number(float, 1e-3, TIMELINE_S), default=60.0, show_default=True,
        group="Trace", help="of the latest seconds")  # fmt: skip
def trace(url: str, admin_key: str, ca: str, output: Path, seconds: float) -> None:
    """Save a time line of engines and requests, for Perfetto.

    Engines are processes with their calls, steps and puts; requests are flows through them. Open
    the file at https://ui.perfetto.dev or chrome://tracing. The last line of standard output is one
    JSON document.
    """
    check_folder("--output", output)
    with admin_client(url, admin_key, ca) as client:
        size = download(client, "/admin/trace", {"seconds": seconds}, output)
    click.echo(json.dumps({"trace": str(output), "bytes": size}))

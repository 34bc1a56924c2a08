"""`microserve profile`: measure an engine, and write its latency profile."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from engine.latency import Profile, doubt, write_profile
from engine.protocol import EngineConfig, MicroserveError
from router.base import StartFailed, print_table, table_console, table_of
from router.cli.config import ENGINE_OWN
from router.cli.options import CA_HELP, GroupedCommand, config_options, given, option, read_ca
from router.engines import HttpClient
from router.profiling import Measurement, measure, two_engines

__all__ = ["profile"]

# Engine flags that do not change what is measured, or that this command sets itself.
OTHERS = (*ENGINE_OWN, "model")


@click.command(cls=GroupedCommand)
@click.argument("target", metavar="URL|MODEL")
@option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), group="Profile",
        help="file to write the profile to  [default: NAME.json]")  # fmt: skip
@option("--name", default="", group="Profile",
        help="its name  [default: MODEL@DEVICE, without folders]")  # fmt: skip
@option("--device-name", default="", metavar="TEXT", group="Profile",
        help="what it runs on  [default: the engine's --device]")  # fmt: skip
@option("--peer", default="", metavar="URL", group="Profile",
        help="of an engine at a URL: another one, to which puts are measured")  # fmt: skip
@option("--engine-api-key", default="", group="Profile", help="key that the engines ask for")
@option("--ca", default="", metavar="FILE", group="Profile", help=CA_HELP)
@config_options(EngineConfig, without=OTHERS)
def profile(
    target: str,
    output: Path | None,
    name: str,
    device_name: str,
    peer: str,
    engine_api_key: str,
    ca: str,
    **flags: Any,
) -> None:
    """Measure an engine and write its profile as JSON.

    URL is an idle engine that runs. For a MODEL, two engines are started with the given flags, and
    end with the command. `simulate` takes the file in --fleet.
    """
    device = device_name or flags["device"]
    name = name or f"{target.rstrip('/').rpartition('/')[2]}@{device}"
    output = output or Path(f"{name.replace(':', '_')}.json")
    tls = read_ca(ca)
    console = Console(stderr=True)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    async def at(url: str, peer_url: str, key: str) -> Measurement:
        with _client(url, key, tls) as engine, _client(peer_url, key, tls) as other:
            return await measure(
                engine, other if peer_url else None, name=name, device=device, say=say
            )

    async def run() -> Measurement:
        if target.startswith(("http://", "https://")):
            return await at(target.rstrip("/"), peer.rstrip("/"), engine_api_key)
        if peer:
            raise click.UsageError("--peer goes with the URL of an engine")
        say(f"loading {target} on two engines …")
        async with two_engines(target, given(EngineConfig, flags), say) as (url, other, key):
            return await at(url, other, key)

    try:
        measured = asyncio.run(run())
        write_profile(measured.profile, output)
    except (MicroserveError, StartFailed) as error:
        raise click.ClickException(str(getattr(error, "message", error))) from None
    except TimeoutError:
        raise click.ClickException(f"{target} does not get on with its steps") from None
    _show(measured.profile)
    warning = doubt(measured.profile.fit) if measured.profile.fit is not None else ""
    if warning:
        click.echo(f"warning: {warning}")
    click.echo(
        json.dumps(
            {
                "profile": str(output), "name": name, "steps": len(measured.steps),
                "warning": warning or None,
            }
        )
    )  # fmt: skip


@contextmanager
def _client(url: str, key: str, tls: ssl.SSLContext | None) -> Iterator[HttpClient]:
    if url.startswith("https:") and tls is None:
        tls = ssl.create_default_context()
    client = HttpClient(url or "http://127.0.0.1", api_key=key, tls=tls)
    try:
        yield client
    finally:
        client.close()


def _show(measured: Profile) -> None:
    """Print the coefficients and how far the points are from them."""
    table = table_of("", "", title=measured.name, folded=(1,))
    table.show_header = False
    table.add_row("KV", f"{measured.kv_bytes_per_token} bytes a token in {measured.layers} layers")
    table.add_row("pool", f"{measured.pool_tokens} tokens")
    table.add_row(
        "puts",
        f"{measured.put.bandwidth / 1e9:.2f} GB/s + {1e6 * measured.put.layer_s:.0f} µs a layer",
    )
    if measured.fit is not None:
        for what, of in (("prompts", measured.fit.prefill), ("decodes", measured.fit.decode)):
            table.add_row(
                f"fit of {what}",
                f"{of.points} points, {100 * of.median:.1f} % off (median), "
                f"{100 * of.largest:.1f} % at most",
            )
    print_table(table, table_console())

"""`microserve strategy`: the admin API's strategies, from the shell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import httpx

from router.cli.options import read_params

__all__ = ["strategy"]


@click.group()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="of the router")
@click.option("--admin-key", default="", help="of the router")
@click.pass_context
def strategy(context: click.Context, url: str, admin_key: str) -> None:
    """Show, choose and load the strategies of a running router."""
    headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
    context.obj = context.with_resource(httpx.Client(base_url=url, headers=headers, timeout=60.0))


@strategy.command("list")
@click.pass_obj
def list_(client: httpx.Client) -> None:
    """All strategies; the active one has a star."""
    state = _call(client, "GET", "/admin/strategies")
    for one in state["strategies"]:
        star = "*" if one["name"] == state["active"]["name"] else " "
        click.echo(f"{star} {one['name']:<20} {one['doc'].partition(chr(10))[0]}")


@strategy.command()
@click.argument("name", required=False)
@click.pass_obj
def show(client: httpx.Client, name: str | None) -> None:
    """The help and params of NAME; without it, what is active and what still runs."""
    state = _call(client, "GET", "/admin/strategies")
    if name is None:
        for one in state["generations"]:
            click.echo(_generation(one) + f", {one['in_flight']} in flight")
        return
    for one in state["strategies"]:
        if one["name"] == name:
            click.echo(f"{name}\n\n{one['doc']}\n")
            for param, schema in one["params"].items():
                click.echo(f"  {param} = {schema.get('default')}  {schema.get('description', '')}")
            return
    raise click.ClickException(f"no strategy {name!r}")


@strategy.command()
@click.argument("name")
@click.option("--param", "params", multiple=True, metavar="K=V")
@click.option("--if-generation", type=int, help="only if this generation is active")
@click.pass_obj
def use(
    client: httpx.Client, name: str, params: tuple[str, ...], if_generation: int | None
) -> None:
    """Make NAME active for new requests."""
    body: dict[str, Any] = {"name": name, "params": read_params(params)}
    if if_generation is not None:
        body["if_generation"] = if_generation
    click.echo(_generation(_call(client, "PUT", "/admin/strategy", body)))


@strategy.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.pass_obj
def load(client: httpx.Client, file: Path) -> None:
    """Load the strategy in FILE, whose name is the file's; `use` makes it active."""
    body = {"name": file.stem, "source": file.read_text()}
    loaded = _call(client, "POST", "/admin/strategies", body)
    click.echo(f"loaded {loaded['name']}")


@strategy.command()
@click.pass_obj
def rollback(client: httpx.Client) -> None:
    """Back to what was active before."""
    click.echo(_generation(_call(client, "POST", "/admin/rollback", {})))


def _generation(one: dict[str, Any]) -> str:
    params = "".join(f" {name}={value}" for name, value in one["params"].items())
    return f"generation {one['generation']}: {one['name']}{params}"


def _call(client: httpx.Client, method: str, path: str, body: Any = None) -> Any:
    try:
        response = client.request(method, path, json=body)
        reply = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise click.ClickException(f"{client.base_url}: {error}") from None
    if response.is_error:
        raise click.ClickException(str(reply["error"]["message"]))
    return reply

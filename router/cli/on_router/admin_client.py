"""The client of a router's admin API, for the commands that use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
import httpx

from router.cli.options import CA_HELP, ServerUrl, option, read_ca

__all__ = ["NoAnswer", "admin_client", "admin_options", "call_admin", "problem_of", "unreachable"]

F = TypeVar("F", bound=Callable[..., Any])
TIMEOUT_S = 60.0


def admin_options(command: F) -> F:
    """Add `--url`, `--admin-key` and `--ca`, as `admin_client` takes them."""
    for add in (
        option("--ca", default="", metavar="FILE", group="Router", help=CA_HELP),
        option("--admin-key", default="", group="Router", help="key of the router's admin API"),
        option("--url", type=ServerUrl(), default="http://127.0.0.1:8000", show_default=True,
               group="Router", help="the router's URL"),
    ):  # fmt: skip
        command = add(command)
    return command


def admin_client(url: str, admin_key: str, ca: str) -> httpx.Client:
    """Return a client of the router at `url`. Raises `BadParameter` for a bad `ca`."""
    headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
    verify = read_ca(ca) or True
    return httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, verify=verify)


def call_admin(client: httpx.Client, method: str, path: str, body: Any = None) -> Any:
    """Return the reply, read as JSON. Raises `ClickException` with the router's complaint."""
    try:
        response = client.request(method, path, json=body)
        reply = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise unreachable(str(client.base_url), error) from None
    if response.is_error:
        raise click.ClickException(problem_of(reply))
    return reply


class NoAnswer(click.ClickException):
    """A call got no answer that can be read; it may have had its effect."""


def unreachable(url: str, error: Exception) -> click.ClickException:
    """Return the error for a call that got no answer.

    If there was no connection, it says how to give another URL. Otherwise it is `NoAnswer`.
    """
    said = f"{url}: {error or type(error).__name__}"
    if not isinstance(error, httpx.ConnectError):
        return NoAnswer(said)
    context = click.get_current_context(silent=True)
    while context is not None and "url" not in (p.name for p in context.command.params):
        context = context.parent
    prefix = context.auto_envvar_prefix if context is not None else None
    flag = f"--url or {prefix}_URL sets" if prefix else "--url sets"
    return click.ClickException(
        f"{said}; {flag} the URL of the router, and `microserve up` starts one"
    )


def problem_of(reply: Any) -> str:
    """Return the message of an error reply."""
    try:
        return str(reply["error"]["message"])
    except (LookupError, TypeError):
        return f"not an error of a router: {str(reply)[:200]}"

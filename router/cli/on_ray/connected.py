"""What the commands share: flags, the connection, and how mistakes are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from router.base import StartFailed
from router.cli.options import Number, option
from router.ray_fleet import Impossible, RayFleet, check_name, connect

__all__ = ["DEFAULT_FLEET", "fleet_on", "fleet_options", "wait_option"]

F = TypeVar("F", bound=Callable[..., Any])
DEFAULT_FLEET = "default"


def fleet_options(command: F) -> F:
    """Add `--on` and `--fleet`."""
    for add in (
        option("--fleet", default=DEFAULT_FLEET, show_default=True, group="Ray",
               help="name of the fleet"),
        option("--on", "on", default="auto", show_default=True, metavar="ADDRESS", group="Ray",
               help="Ray cluster: auto, ray://HOST:PORT, or HOST:PORT of its head"),
    ):  # fmt: skip
        command = add(command)
    return command


def wait_option(default: float, what: str) -> Callable[[F], F]:
    """Return `--wait-s`."""
    return option("--wait", "--wait-s", "wait_s", type=Number(float, 1, 1e6), default=default,
                  show_default=True, group="Ray", help=what)  # fmt: skip


@contextmanager
def fleet_on(address: str, name: str, *, logs: bool = False) -> Iterator[RayFleet]:
    """Connect to Ray and disconnect. What cannot be done is shown as one line, exit status 1."""
    try:
        check_name(name)
        ray = connect(address, logs=logs)
        try:
            yield RayFleet(ray, name)
        except (ray.exceptions.RayError, ConnectionError) as error:
            said = str(error).strip().splitlines()
            raise Impossible(f"Ray does not answer: {said[0] if said else error!r}") from None
        finally:
            ray.shutdown()
    except (Impossible, StartFailed) as error:
        raise click.ClickException(str(error)) from None

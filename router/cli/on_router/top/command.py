"""The command: asks a router again and again, and shows a frame each time."""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType

import click
import httpx
from rich.live import Live

from router.base import table_console
from router.cli.on_router.admin_client import admin_client, admin_options, unreachable
from router.cli.on_router.top.router_state import Away, Events, History, ask
from router.cli.on_router.top.view import show
from router.cli.options import GroupedCommand, Number, option
from router.cli.progress import on_signal

__all__ = ["top"]

ANSWER_S = 5.0
BETWEEN_S = 1.0  # the two looks of --once, for rates


@click.command(cls=GroupedCommand)
@admin_options
@option("--interval", type=Number(float, 0.1, 3600.0), default=2.0, show_default=True,
        group="View", help="time between two frames (s)")  # fmt: skip
@option("--once", is_flag=True, group="View",
        help="print one frame and end, as without a terminal")  # fmt: skip
def top(url: str, admin_key: str, ca: str, interval: float, once: bool) -> None:
    """Show a fleet: requests, latency, strategy, engines, events.

    Latencies are those of the latest minute; of a single frame, those since the router's start.
    Ctrl-C ends it. A router that goes away is shown as such until it is back.
    """
    with admin_client(url, admin_key, ca) as client:
        client.timeout = httpx.Timeout(ANSWER_S)
        if once or not sys.stdout.isatty():
            history = History(whole=True)
            try:
                history.add(ask(client))
                time.sleep(min(interval, BETWEEN_S))
                history.add(ask(client))
            except Away as away:
                raise unreachable(url, httpx.ConnectError(str(away))) from None
            console = table_console()
            console.print(show(console, url, history, Events()), crop=False)
            return
        _watch(client, url, interval)


def _watch(client: httpx.Client, url: str, interval: float) -> None:
    """Show frames until Ctrl-C or SIGTERM; then the terminal is as it was."""
    history, events = History(), Events()
    events.follow(client)

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    console = table_console()
    with (
        on_signal(signal.SIGTERM, end),
        Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        try:
            while True:
                began, away = time.monotonic(), ""
                try:
                    history.add(ask(client))
                except Away as error:
                    away = str(error)
                frame = show(console, url, history, events, away, height=console.height)
                live.update(frame, refresh=True)
                time.sleep(max(began + interval - time.monotonic(), 0.0))
        except KeyboardInterrupt:
            pass

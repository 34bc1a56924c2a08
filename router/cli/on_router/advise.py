"""`microserve advise`: which strategy would serve a router's own traffic best."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import click
import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from engine.latency import find_profile, profile_fields
from engine.protocol import MicroserveError
from router.base import print_table, table_console, table_of
from router.cli.on_router.admin_client import (
    NoAnswer,
    admin_client,
    admin_options,
    call_admin,
    problem_of,
    unreachable,
)
from router.cli.options import GroupedCommand, Number, option, read_params
from router.cli.preflight import Mistake
from router.cli.progress import cleared_on_sigterm, on_signal
from router.cli.workload_options import POSITIVE

__all__ = ["advise"]

CALL_S = 60.0
SILENCE_S = 900.0  # of the router, longer than one candidate may take
MOST_EVENT = 16 << 20  # bytes
PERCENT = Number(float, 1e-6, 100.0)


@click.command(cls=GroupedCommand)
@admin_options
@option("--minutes", type=Number(float, 1e-3, 10_080.0), default=15.0, show_default=True,
        group="Question", help="for the traffic of the latest minutes")  # fmt: skip
@option("--candidate", "candidates", multiple=True, metavar="NAME[:K=V,…]", group="Question",
        help="strategy to compare; repeatable  [default: all, in several ways]")  # fmt: skip
@option("--slo-ttft-ms", type=POSITIVE, group="Question",
        help="objective for the time to first token (ms)")  # fmt: skip
@option("--slo-tpot-ms", type=POSITIVE, group="Question",
        help="objective for the time per output token after the first (ms)")  # fmt: skip
@option("--seeds", type=click.IntRange(2, 20), default=5, show_default=True, group="Question",
        help="runs of each candidate, to know the spread")  # fmt: skip
@option("--profile", default="", metavar="NAME|FILE.json", group="Question",
        help="speed of engines whose own steps do not suffice")  # fmt: skip
@option("--apply", is_flag=True, group="Apply",
        help="start what is proposed as a canary, after changing the engines' roles if need be",
)  # fmt: skip
@option("--canary", type=PERCENT, default=5.0, show_default=True, group="Apply",
        help="its share of the requests (%)")  # fmt: skip
@option("--min-requests", type=Number(int, 1, 10**6), default=100, show_default=True,
        group="Apply", help="number of requests after which it is judged")  # fmt: skip
@option("--max-ttft-p99-ms", type=POSITIVE, group="Apply",
        help="99th percentile that its time to first token may have (ms)")  # fmt: skip
def advise(url: str, admin_key: str, ca: str, **options: Any) -> None:
    """Say which strategy would serve a router's own traffic best.

    The router runs strategies in virtual time: under the traffic that it has recorded, and on
    engines as fast as its own. That takes a minute or more. Prints the ranking, and one JSON
    document as the last line of standard output. Nothing changes without --apply.
    """
    body = _question(options)
    applied, problem = None, None
    with admin_client(url, admin_key, ca) as client:
        if options["apply"]:
            _check_canary(client)
        advice = _ask(client, body)
        try:
            _show(advice)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            message = f"{url}: what the router answers is no advice: {error!r}"
            raise click.ClickException(message) from None
        if options["apply"] and not advice["keep"]:
            try:
                applied = _apply(client, advice, options)
            except click.ClickException as error:
                problem = error
    said = problem.message if problem is not None else None
    click.echo(json.dumps({**advice, "applied": applied, "error": said}))
    if problem is not None:
        raise problem


def _check_canary(client: httpx.Client) -> None:
    """Raise `ClickException` if a canary runs: there can be no other beside it."""
    canary = call_admin(client, "GET", "/admin/strategies")["canary"]
    if canary is not None:
        raise click.ClickException(
            f"generation {canary['generation']} is a canary, and there is one at a time: wait "
            "until it is judged, or end it with `microserve strategy rollback`"
        )


def _question(options: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the call. Raises `Mistake` for a profile that is none."""
    names = ("minutes", "seeds", "slo_ttft_ms", "slo_tpot_ms")
    body = {name: options[name] for name in names if options[name] is not None}
    if options["candidates"]:
        body["candidates"] = [_candidate(text) for text in options["candidates"]]
    if options["profile"]:
        try:
            body["profile"] = profile_fields(find_profile(options["profile"]))
        except MicroserveError as error:
            raise Mistake(error.message) from None
    return {**body, "stream": True}


def _candidate(text: str) -> dict[str, Any]:
    name, _, pairs = text.partition(":")
    return {"name": name, "params": read_params(pairs.split(",")) if pairs else {}}


def _ask(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """Return the router's advice; show the progress until it comes."""
    timeout = httpx.Timeout(CALL_S, read=SILENCE_S)
    try:
        with (
            client.stream("POST", "/admin/advise", json=body, timeout=timeout) as reply,
            _progress() as show,
        ):
            if reply.is_error:
                reply.read()
                raise click.ClickException(problem_of(reply.json()))
            for event in _events(reply):
                if "progress" in event:
                    show(event["progress"])
                elif "advice" in event:
                    advice: dict[str, Any] = event["advice"]
                    return advice
                else:
                    raise click.ClickException(problem_of(event))
    except (
        httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError, RecursionError,
    ) as error:  # fmt: skip
        raise unreachable(str(client.base_url), error) from None
    raise click.ClickException(f"{client.base_url}: the router ended its answer early")


def _events(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream. Raises `ValueError` for one that is too long, late or none."""
    line, since = bytearray(), time.monotonic()
    for piece in reply.iter_bytes():
        line += piece
        while (end := line.find(b"\n")) >= 0:
            data = bytes(line[:end])
            del line[: end + 1]
            if data.startswith(b"data: "):
                event = json.loads(data.removeprefix(b"data: "))
                if not isinstance(event, dict):
                    raise ValueError("the router sends events that are no objects")
                yield event
                since = time.monotonic()
        if len(line) > MOST_EVENT:
            raise ValueError(f"the router sends an event of more than {MOST_EVENT} bytes")
        if time.monotonic() - since > SILENCE_S:
            raise ValueError(f"the router sent no event for {SILENCE_S:g} s")


@contextmanager
def _progress() -> Iterator[Any]:
    """A progress bar on standard error."""
    columns = (
        TextColumn("{task.completed} of {task.total}"),
        BarColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with (
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
        cleared_on_sigterm(),
    ):
        bars: list[TaskID] = []

        def show(told: dict[str, Any]) -> None:
            if not bars:
                bars.append(progress.add_task("", total=told["total"]))
            progress.update(bars[0], completed=told["done"], description=told["candidate"])

        yield show


def _show(advice: dict[str, Any]) -> None:
    """Print the ranking and the advice."""
    traffic, goodput = advice["traffic"], advice["objective"] == "goodput"
    title = (
        f"{traffic['requests']} requests of {traffic['seconds']:.0f} s, "
        f"{advice['seeds']} runs each; gain: {'goodput' if goodput else 'mean JCT'}"
    )
    table = table_of(
        "", "", ">gain", ">JCT\nms", ">TTFT\nms", ">TTFT\nP99", ">TPOT\nms", ">attained", ">busy",
        title=title, folded=(1,),
    )  # fmt: skip
    remarks = []
    for row in advice["ranking"]:
        proposed = advice["proposal"] is not None and row["title"] == advice["proposal"]["title"]
        name = Text(row["title"] + (" (now)" if row["current"] else ""))
        if row["failed"]:
            remarks.append(f"{row['title']} failed: {row['failed']}")
        if row["alike"]:
            others = ", ".join(one["title"] for one in row["alike"])
            remarks.append(f"the same under this traffic as {row['title']}: {others}")
        if row.get("jct_ms") is None:
            table.add_row("", name, "failed")
            continue
        gain = f"{row['gain']:+.1%} ±{row['spread']:.1%}" if row["gain"] is not None else "–"
        times = (row["jct_ms"], row["ttft_ms"], row["ttft_p99_ms"], row["tpot_ms"])
        cells = [
            "–" if time is None else f"{time:.0f}" if time >= 100 else f"{time:.3g}"
            for time in times
        ]
        table.add_row(
            "★" if proposed else "", name, gain if not row["failed"] else "failed", *cells,
            f"{row['attained']:.1%}", f"{row['utilisation']:.0%}",
        )  # fmt: skip
    print_table(table, table_console())
    click.echo()
    for remark in remarks:
        click.echo(remark)
    for note in advice["notes"]:
        click.echo(f"note: {note}")
    click.echo(advice["why"])


def _apply(client: httpx.Client, advice: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Change roles if need be, and start the proposal as a canary; return what was done.

    If the strategy cannot be started, the roles become what they were.
    """
    proposal = advice["proposal"]
    before = {
        one["id"]: one["role"] for one in call_admin(client, "GET", "/admin/engines")["engines"]
    }
    roles = {id: role for id, role in proposal["roles"].items() if before.get(id) != role}
    if roles:
        click.echo(
            "roles change at once, also for requests under the present strategy: "
            + ", ".join(f"{id} to {role}" for id, role in roles.items())
        )
    if gone := [id for id in roles if id not in before]:
        raise click.ClickException(f"engine {gone[0]} has gone since: ask again")
    current = next(row for row in advice["ranking"] if row["current"])
    same = (proposal["name"], proposal["params"]) == (current["name"], current["params"])
    applied: dict[str, Any] = {"roles": roles, "generation": None, "canary": None}
    with _restored(client, before) as change:
        for id, role in roles.items():
            change(id, role)
        if same:
            click.echo(f"{proposal['name']} runs already, with these parameters")
            return applied
        rules = {"percent": options["canary"], "min_requests": options["min_requests"]}
        if options["max_ttft_p99_ms"] is not None:
            rules["max_ttft_p99_ms"] = options["max_ttft_p99_ms"]
        body = {
            "name": proposal["name"], "params": proposal["params"], "canary": rules,
            "if_generation": advice["generation"],
        }  # fmt: skip
        try:
            state = call_admin(client, "PUT", "/admin/strategy", body)
        except NoAnswer as error:
            raise click.ClickException(
                f"{error.message}: the canary may run nevertheless, see `microserve strategy show`"
            ) from None
    click.echo(
        f"generation {state['generation']} is a canary with {options['canary']:g} % of the requests"
    )
    return {**applied, "generation": state["generation"], "canary": rules}


@contextmanager
def _restored(
    client: httpx.Client, before: dict[str, str]
) -> Iterator[Callable[[str, str], object]]:
    """Yield a function that changes an engine's role.

    Leaving early gives the engines their roles back, also by Ctrl-C and SIGTERM.
    """
    changed: list[str] = []

    def change(id: str, role: str) -> None:
        changed.append(id)  # first: the reply to the change may be lost
        call_admin(client, "PATCH", f"/admin/engines/{quote(id)}", {"role": role})

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    with on_signal(signal.SIGTERM, end):
        try:
            yield change
        except BaseException:
            with (
                on_signal(signal.SIGTERM, signal.SIG_IGN),
                on_signal(signal.SIGINT, signal.SIG_IGN),
            ):
                for id in changed:
                    _give_back(client, id, before[id])
            raise


def _give_back(client: httpx.Client, id: str, role: str) -> None:
    try:
        call_admin(client, "PATCH", f"/admin/engines/{quote(id)}", {"role": role})
    except click.ClickException as error:
        click.echo(f"engine {id} does not become {role} again: {error.message}", err=True)

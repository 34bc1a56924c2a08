"""One frame of `top`. What a router tells is shown as text, never as markup or control codes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from datetime import datetime

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from router.base import fits, table_of
from router.cli.on_router.top.answers import Engine, Revision, State
from router.cli.on_router.top.router_state import SHOWN_EVENTS, Events, Frame, History

__all__ = ["show"]

BAR = 20  # characters
# Owners of pages: name, sign, style.
OWNERS = (
    ("active", "█", "green"), ("leased", "▓", "cyan"), ("lent", "▒", "magenta"),
    ("quarantined", "!", "red"), ("cached", "░", "blue"), ("free", "·", "dim"),
)  # fmt: skip
COLUMNS = {
    "engine": "engine", "role": "role", "status": "status", "epoch": ">epoch", "run": ">run",
    "wait": ">wait", "puts": ">puts", "load": ">load", "breaker": "breaker",
    "tokens/s": ">tokens/s", "pages": f"{'pages':<{BAR}}",
}  # fmt: skip
# Where there is little room, in this order. The name and the status of an engine stay.
LEFT_OUT = ("breaker", "epoch", "puts", "load", "role", "pages", "wait", "run", "tokens/s")
STATUS = {"up": "green", "down": "bold red"}
DASH = "–"
SHOWN_DIGITS = 6  # of an epoch


def show(
    console: Console,
    url: str,
    history: History,
    events: Events,
    away: str = "",
    *,
    height: int | None = None,
) -> RenderableType:
    """Return a frame; `away` says why the router does not answer now. `height`: lines at most."""
    frame = history.latest
    head = Text.assemble(
        ("microserve top", "bold"), "  ", _plain(url), "  ", time.strftime("%H:%M:%S"), "  "
    )
    if away:
        head.append(f"no answer: {_plain(away)}", "bold red")
        if frame is not None:
            head.append(f"  (last one {time.monotonic() - frame.at:.0f} s ago)", "red")
    else:
        head.append("up", "bold green")
    if frame is None:
        return head
    lines: list[RenderableType] = [head, *_requests(history, frame), *_strategy(frame)]
    last = _events(frame, events)
    room = None if height is None else max(height - len(lines) - len(last) - 6, 1)
    table, left_out = _engines(history, frame, console, room)
    lines += [Text(), table]
    if left_out:
        lines.append(Text(f"and {left_out} more engines", "dim"))
    if any(str(column.header).startswith("pages") for column in table.columns):
        lines.append(_legend())
    return Group(*lines, Text(), *last)


def _requests(history: History, frame: Frame) -> Iterable[Text]:
    metrics = frame.metrics
    rate = history.rate("requests_total")
    done = history.rate("requests_total", status="done")
    failed = None if rate is None or done is None else max(rate - done, 0.0)
    yield Text.assemble(
        ("requests  ", "bold"),
        f"{metrics.total('requests_in_flight'):.0f} live, "
        f"{metrics.total('requests_waiting'):.0f} queued, "
        f"{_number(rate)}/s, ",
        (f"{_number(failed)}/s not done", "red" if failed else ""),
        f", {_number(history.all_tokens_per_s())} tokens/s",
    )
    yield Text.assemble(
        ("latency   ", "bold"),
        f"TTFT {_quantiles(history, 'time_to_first_token_seconds')}, "
        f"TPOT {_quantiles(history, 'time_per_output_token_seconds')}",
    )


def _strategy(frame: Frame) -> Iterable[Text]:
    told = frame.strategies
    yield Text.assemble(("strategy  ", "bold"), _revision(told.active))
    if (canary := told.canary) is not None:
        number = canary.generation
        found = [one for one in told.generations if one.generation == number]
        name = _revision(found[0]) if found else f"generation {number}"
        yield Text.assemble(
            ("canary    ", "bold yellow"),
            f"{name}: {canary.percent:g} % of the requests, {canary.ended} of "
            f"{canary.min_requests} ended, {canary.failed} failed",
        )
    elif (last := told.last_canary) is not None:
        text = f"generation {last.generation} was {_plain(last.decision)}: {_plain(last.why)}"
        yield Text.assemble(("canary    ", "bold"), text)


def _engines(
    history: History, frame: Frame, console: Console, room: int | None
) -> tuple[Table, int]:
    """Return the table, and how many engines it has no room for.

    Where the console is too narrow, columns are left out.
    """
    engines = frame.engines if room is None else frame.engines[:room]
    rows = [_row(history, engine) for engine in engines]
    columns = list(COLUMNS)
    for left_out in ("", *LEFT_OUT):
        columns = [name for name in columns if name != left_out]
        table = table_of(*[COLUMNS[name] for name in columns])
        for row in rows:
            table.add_row(*[row[name] for name in columns])
        if fits(table, console):
            break
    return table, len(frame.engines) - len(engines)


def _row(history: History, engine: Engine) -> dict[str, Text]:
    state = engine.state or State()
    drains = engine.draining and engine.status == "up"
    status = _plain("draining" if drains else engine.status)
    return {
        "engine": Text(_plain(engine.id)),
        "role": Text(_plain(engine.role)),
        "status": Text(status, STATUS.get(status, "yellow")),
        "epoch": Text(_epoch(state.epoch)),
        "run": Text(_count(state.running)),
        "wait": Text(_count(state.waiting)),
        "puts": Text(_count(state.puts_in_flight)),
        "load": Text(_count(engine.load.tokens + engine.load.streams)),
        "breaker": Text(_plain(engine.breaker)),
        "tokens/s": Text(_number(history.tokens_per_s(engine))),
        "pages": _bar(state.pages),
    }


def _epoch(epoch: int | None) -> str:
    """Return the end of the number: enough to see that it has changed."""
    if epoch is None:
        return DASH
    return (
        str(epoch) if epoch < 10**SHOWN_DIGITS else f"…{epoch % 10**SHOWN_DIGITS:0{SHOWN_DIGITS}}"
    )


def _count(value: int | None) -> str:
    return DASH if value is None else str(value)


def _bar(pages: dict[str, int]) -> Text:
    total = pages.get("total", 0)
    bar = Text()
    if not total:
        return Text(DASH)
    shown = [(pages.get(name, 0), sign, style) for name, sign, style in OWNERS]
    ends, at = [], 0
    for count, _, _ in shown:
        at += count
        ends.append(round(BAR * at / total))
    begin = 0
    for end, (count, sign, style) in zip(ends, shown, strict=True):
        end = max(end, begin + 1) if count else max(end, begin)  # a page is seen
        bar.append(sign * (min(end, BAR) - begin), style)
        begin = min(end, BAR)
    bar.append(f" {100 * (1 - pages.get('free', 0) / total):3.0f} %")
    return bar


def _legend() -> Text:
    text = Text(style="dim")
    for name, sign, style in OWNERS:
        text.append(sign, style)
        text.append(f" {name}  ")
    return text


def _events(frame: Frame, events: Events) -> list[Text]:
    """Return the latest events, newest first; before them, those of the audit log."""
    live = [(_seconds(about.get("at")), kind, about) for kind, about in tuple(events.latest)]
    first = min((at for at, _, _ in live), default=math.inf)
    logged = [
        (_seconds(entry.get("at")), str(entry.get("what", "")), entry)
        for entry in frame.audit
        if isinstance(entry, dict)
    ]
    told = sorted([one for one in logged if one[0] < first] + live, key=lambda one: one[0])
    lines = []
    for at, kind, about in told[: -SHOWN_EVENTS - 1 : -1]:
        said = ", ".join(
            f"{name} {value}"
            for name, value in about.items()
            if name not in ("at", "what") and value not in (None, "", [], {})
        )
        line = f"{time.strftime('%H:%M:%S', time.localtime(at))}  {kind:<10} {said}"
        lines.append(Text(_plain(line), no_wrap=True, overflow="ellipsis"))
    return lines


def _seconds(at: object) -> float:
    """Return a time of an event or of the audit log in Unix seconds; 0 if it is none."""
    try:
        seconds = at if isinstance(at, int | float) else datetime.fromisoformat(str(at)).timestamp()
        return seconds if 0 <= seconds < 1e11 else 0.0
    except (ValueError, OverflowError):
        return 0.0


def _revision(one: Revision) -> str:
    params = "".join(f" {name}={value}" for name, value in one.params.items())
    return _plain(f"{one.name}{params} (generation {one.generation}, {one.in_flight} in flight)")


def _quantiles(history: History, name: str) -> str:
    values = [history.quantile(share, name) for share in (0.5, 0.99)]
    p50, p99 = [DASH if value is None else f"{1e3 * value:.0f} ms" for value in values]
    return f"p50 {p50} p99 {p99}"


def _number(value: float | None) -> str:
    return DASH if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _plain(value: object) -> str:
    """Return it as text that can do nothing to a terminal."""
    return "".join(
        [char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(value)]
    )

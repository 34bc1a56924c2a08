"""The figures of simulated runs, and tables of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from router.base import fits, print_table, table_of
from router.simulation.experiment import Outcome
from router.telemetry import Slo, percentile

__all__ = ["TARGET", "Run", "best_run", "show_engines", "show_runs", "summarize", "sustained"]

QUANTILES = (50, 90, 99)
TIMES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "jct_ms": "JCT"}
COLUMNS = ("mean", *(f"p{percent}" for percent in QUANTILES))
TIMES_HEADINGS = ("ms", *(">" + column.replace("p", "P") for column in COLUMNS))
TOTALS_HEADINGS = (">done", ">attained", ">goodput/s", ">busy", ">KV peak", ">put GB")
TARGET = 0.9  # the share of requests that shall attain their objectives (DistServe, §6)
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """A strategy at a rate with a seed, and its figures. `rate` `None`: a trace's own times."""

    strategy: str  # with its parameters, as the user wrote it
    params: dict[str, Any]
    rate: float | None
    seed: int
    figures: Figures


def summarize(outcome: Outcome, slo: Slo, *, separate: bool = False) -> Figures:
    """Return the figures of a run, in milliseconds, seconds and shares.

    A request attains the objectives if it meets both (DistServe §2). With `separate`, as in
    DistServe's code, each is held against all requests, and the smaller share counts. A rejected or
    failed request attains nothing.
    """
    records = outcome.records
    good = [record for record in records if record.ok]
    errors = [record.error or "no token" for record in records if not record.ok]
    rejected = sum(error.startswith("no_capacity") for error in errors)
    ttft = [slo.meets_ttft(record.first_token_s) for record in good]
    tpot = [slo.meets_tpot(record.per_token_s) for record in good]
    both = sum(map(all, zip(ttft, tpot, strict=True)))
    attained = min(sum(ttft), sum(tpot)) if separate else both
    engines, count = outcome.engines, len(records)
    return {
        "requests": count,
        "completed": len(good),
        "rejected": rejected,
        "errors": len(errors) - rejected,
        "error_messages": dict(Counter(errors).most_common(5)),
        "retries": sum(record.retries for record in records),
        "seconds": outcome.seconds,
        "requests_per_s": _per(len(good), outcome.seconds),
        "output_tokens_per_s": _per(sum(r.output_tokens for r in good), outcome.seconds),
        "in_system": outcome.in_system,
        "ttft_ms": _spread(record.first_token_s for record in good),
        "tpot_ms": _spread(record.per_token_s for record in good),
        "jct_ms": _spread(record.end_s for record in good),
        "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms, "separate": separate},
        "attained": _per(attained, count),
        "attained_ttft": _per(sum(ttft), count),
        "attained_tpot": _per(sum(tpot), count),
        "goodput_per_s": _per(attained, outcome.seconds),
        "utilisation": fmean(engine.utilisation for engine in engines),
        "kv_mean": fmean(engine.kv_mean for engine in engines),
        "kv_peak": max(engine.kv_peak for engine in engines),
        "put_bytes": sum(engine.put_bytes for engine in engines),
        "engines": [asdict(engine) for engine in engines],
    }


def sustained(runs: Sequence[Run], target: float = TARGET) -> dict[str, float | None]:
    """Return each strategy's goodput over the rates that were run (DistServe §2).

    That is the highest rate at which the mean attainment over all seeds is `target` or more;
    `None`: there is none.
    """
    found: dict[str, float | None] = {}
    for (strategy, rate), some in _by_setting(runs).items():
        found.setdefault(strategy, None)
        attained = fmean(run.figures["attained"] for run in some)
        if rate is not None and attained >= target and rate > (found[strategy] or 0.0):
            found[strategy] = rate
    return found


def best_run(runs: Sequence[Run], slo: Slo) -> str:
    """Return the best strategy of runs at one rate: the most goodput, then the shortest mean JCT.

    Without objectives every completed request counts for goodput.
    """

    def merit(strategy: str) -> tuple[float, float]:
        figures = [run.figures for run in runs if run.strategy == strategy]
        times = [f["jct_ms"]["mean"] for f in figures if f["completed"]]
        goodput = fmean(f["attained" if slo != Slo() else "completed"] for f in figures)
        return goodput, -fmean(times) if times else float("-inf")

    return max(dict.fromkeys(run.strategy for run in runs), key=merit)


def show_runs(runs: Sequence[Run], slo: Slo, console: Console) -> None:
    """Print a table for each rate. A star marks the best strategy, and bold the best figures.

    With several seeds, figures are means over them, and ± is their standard deviation. On a console
    that is too narrow for all columns, times and totals are two tables.
    """
    for rate in dict.fromkeys(run.rate for run in runs):
        at_rate = [run for run in runs if run.rate == rate]
        title = "at the trace's own times" if rate is None else f"{rate:g} requests/s"
        best = best_run(at_rate, slo)
        groups = {strategy: some for (strategy, _), some in _by_setting(at_rate).items()}
        rows = _rows(groups, best)
        whole = _table(title, rows, 0, len(TIMES_HEADINGS) + len(TOTALS_HEADINGS))
        if fits(whole, console):
            print_table(whole, console)
        else:
            print_table(_table(title, rows, 0, len(TIMES_HEADINGS)), console)
            console.print()
            print_table(_table("", rows, len(TIMES_HEADINGS), len(rows[0][2])), console)
        console.print()


def show_engines(run: Run, console: Console) -> None:
    """Print how much of each engine a run has used."""
    table = table_of(
        "engine", ">busy", ">steps", ">KV mean", ">KV peak", ">put GB",
        title=f"engines under {run.strategy}",
    )  # fmt: skip
    for engine in run.figures["engines"]:
        table.add_row(
            engine["id"] + (" (died)" if engine["died"] else ""), f"{engine['utilisation']:.0%}",
            str(engine["steps"]), f"{engine['kv_mean']:.1%}", f"{engine['kv_peak']:.1%}",
            f"{engine['put_bytes'] / 1e9:.3g}",
        )  # fmt: skip
    print_table(table, console)


def _rows(groups: dict[str, list[Run]], best: str) -> list[tuple[str, str, list[str]]]:
    """Return star, name and cells of each strategy. Cells of times have a line for each kind."""
    lows = {
        (time, column): min(_mean(some, time, column) for some in groups.values())
        for time in TIMES
        for column in COLUMNS
    }
    rows = []
    for strategy, some in groups.items():
        times = [
            "\n".join(_cell(some, time, column, lows[time, column], len(groups)) for time in TIMES)
            for column in COLUMNS
        ]
        star = "★" if strategy == best and len(groups) > 1 else ""
        rows.append((star, strategy, ["\n".join(TIMES.values()), *times, *_totals(some)]))
    return rows


def _table(title: str, rows: Sequence[tuple[str, str, list[str]]], first: int, end: int) -> Table:
    """Return a table of the names and of the cells from `first` to before `end`."""
    headings = [*TIMES_HEADINGS, *TOTALS_HEADINGS][first:end]
    table = table_of("", "", *headings, title=title, folded=(1,))
    for star, name, cells in rows:
        table.add_row(star, Text(name), *cells[first:end], end_section=first == 0)
    return table


def _by_setting(runs: Sequence[Run]) -> dict[tuple[str, float | None], list[Run]]:
    groups: dict[tuple[str, float | None], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.strategy, run.rate), []).append(run)
    return groups


def _spread(seconds: Iterable[float | None]) -> dict[str, float | None]:
    values = sorted(value * 1e3 for value in seconds if value is not None)
    quantiles = {f"p{percent}": percentile(values, percent) for percent in QUANTILES}
    return {"mean": fmean(values) if values else None, **quantiles}


def _values(runs: Sequence[Run], time: str, column: str) -> list[float]:
    found = [run.figures[time][column] for run in runs]
    return [value for value in found if value is not None]


def _mean(runs: Sequence[Run], time: str, column: str) -> float:
    values = _values(runs, time, column)
    return fmean(values) if values else float("inf")


def _cell(runs: Sequence[Run], time: str, column: str, low: float, strategies: int) -> str:
    values = _values(runs, time, column)
    if not values:
        return "–"
    mean = fmean(values)
    text = _short(values)
    return f"[bold]{text}[/bold]" if strategies > 1 and mean == low else text


def _totals(runs: Sequence[Run]) -> list[str]:
    def mean(name: str) -> float:
        return fmean(run.figures[name] for run in runs)

    goodput = [run.figures["goodput_per_s"] for run in runs]
    done = mean("completed") / mean("requests")
    return [
        "all" if done == 1 else f"{done:.1%}", f"{mean('attained'):.1%}",
        _short(goodput), f"{mean('utilisation'):.0%}", f"{mean('kv_peak'):.0%}",
        f"{mean('put_bytes') / 1e9:.3g}",
    ]  # fmt: skip


def _short(values: Sequence[float]) -> str:
    """Return the mean, and ± the standard deviation of several, with as many decimals."""
    mean = fmean(values)
    if len(values) == 1:
        return f"{mean:.0f}" if mean >= 100 else f"{mean:.3g}"
    decimals = 0 if mean >= 100 else 1 if mean >= 10 else 2
    return f"{mean:.{decimals}f}±{stdev(values):.{decimals}f}"


def _per(count: float, of: float) -> float:
    return count / of if of else 0.0

"""Summarizes the outcomes of a run: latencies, goodput, rejections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from router.load.client import Outcome
from router.telemetry import Slo, percentile

__all__ = ["show", "summarize"]

QUANTILES = (50, 90, 99)


def summarize(outcomes: Sequence[Outcome], slo: Slo) -> dict[str, Any]:
    """Return the figures of a run, in milliseconds and per second.

    Attainment is a share of all requests sent; a rejected or failed one attains nothing. Goodput
    counts requests that meet both objectives (DistServe §2).
    """
    good = [outcome for outcome in outcomes if outcome.ok]
    took_s = max((outcome.due_s + outcome.end_s for outcome in outcomes), default=0.0)
    ttft = [slo.meets_ttft(outcome.first_token_s) for outcome in good]
    tpot = [slo.meets_tpot(outcome.per_token_s) for outcome in good]
    both = sum(map(all, zip(ttft, tpot, strict=True)))
    failed = [o for o in outcomes if not o.ok and not o.rejected]
    tokens_in = sum(outcome.input_tokens or 0 for outcome in good)
    tokens_out = sum(outcome.output_tokens for outcome in good)
    return {
        "requests": len(outcomes),
        "completed": len(good),
        "rejected": sum(outcome.rejected for outcome in outcomes),
        "errors": len(failed),
        "error_messages": dict(Counter(o.error or "no token" for o in failed).most_common(5)),
        "seconds": took_s,
        "requests_per_s": _per(len(good), took_s),
        "input_tokens_per_s": _per(tokens_in, took_s),
        "output_tokens_per_s": _per(tokens_out, took_s),
        "ttft_ms": _quantiles(outcome.first_token_s for outcome in good),
        "tpot_ms": _quantiles(outcome.per_token_s for outcome in good),
        "itl_ms": _quantiles(gap for outcome in good for gap in outcome.gaps_s),
        "jct_ms": _quantiles(outcome.end_s for outcome in good),
        "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms},
        "attained": _per(both, len(outcomes)),
        "attained_ttft": _per(sum(ttft), len(outcomes)),
        "attained_tpot": _per(sum(tpot), len(outcomes)),
        "goodput_per_s": _per(both, took_s),
    }


def show(title: str, figures: dict[str, Any], console: Console) -> None:
    """Print a table of counts and a table of latencies."""
    counts = Table(title=title, title_justify="left", show_header=False)
    for name in (
        "requests", "completed", "rejected", "errors", "requests_per_s", "output_tokens_per_s",
        "attained", "goodput_per_s",
    ):  # fmt: skip
        value = figures[name]
        counts.add_row(name, f"{value:.3g}" if isinstance(value, float) else str(value))
    console.print(counts)
    times = Table()
    times.add_column("ms")
    for percent in QUANTILES:
        times.add_column(f"p{percent}", justify="right")
    for name in ("ttft", "tpot", "itl", "jct"):
        row = figures[f"{name}_ms"].values()
        times.add_row(name.upper(), *("–" if ms is None else f"{ms:.1f}" for ms in row))
    console.print(times)


def _quantiles(seconds: Iterable[float | None]) -> dict[str, float | None]:
    values = [value * 1e3 for value in seconds if value is not None]
    return {f"p{percent}": percentile(values, percent) for percent in QUANTILES}


def _per(count: float, of: float) -> float:
    return count / of if of else 0.0

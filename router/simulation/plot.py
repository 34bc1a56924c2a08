"""Pictures of simulated runs, by matplotlib (extra `plot`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from engine.protocol import BadRequest
from router.simulation.report import TIMES, Run

__all__ = ["check_plot", "plot"]

LINES = {"p50": "-", "p99": "--"}


def check_plot(path: Path) -> None:
    """Raise `BadRequest` if no picture can be drawn there, before anything is computed."""
    figure = _pyplot().figure()
    try:
        kinds = sorted(figure.canvas.get_supported_filetypes())
    finally:
        _pyplot().close(figure)
    if path.suffix[1:].lower() not in kinds:  # matplotlib would change a name without a suffix
        raise BadRequest(f"--plot {path}: want a name that ends in one of .{', .'.join(kinds)}")


def plot(runs: Sequence[Run], path: Path) -> None:
    """Draw P50 (solid) and P99 (dashed) of each time over the rates, a colour per strategy.

    With several seeds, points are means over them. Raises `BadRequest` without matplotlib, or if
    the file cannot be written.
    """
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(1, len(TIMES), figsize=(4 * len(TIMES), 3.5))
    rates = sorted({run.rate or 0.0 for run in runs})
    for panel, (time, name) in zip(panels, TIMES.items(), strict=True):
        for number, strategy in enumerate(dict.fromkeys(run.strategy for run in runs)):
            mine = [run for run in runs if run.strategy == strategy]
            for quantile, line in LINES.items():
                values = [_mean(mine, rate, time, quantile) for rate in rates]
                label = f"{strategy} {quantile.upper()}"
                panel.plot(rates, values, line, marker="o", color=f"C{number}", label=label)
        panel.set(title=name, xlabel="requests/s", ylabel="ms")
        panel.set_ylim(bottom=0)
    panels[0].legend()
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise BadRequest(f"--plot {path}: {error}") from None
    finally:
        pyplot.close(figure)


def _mean(runs: Sequence[Run], rate: float, time: str, quantile: str) -> float:
    found = [run.figures[time][quantile] for run in runs if (run.rate or 0.0) == rate]
    values = [value for value in found if value is not None]
    return fmean(values) if values else float("nan")


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
        from matplotlib import pyplot
    except ImportError:
        raise BadRequest("--plot needs matplotlib: pip install 'microserve[plot]'") from None
    mpl.use("Agg")  # draws without a display
    return pyplot

"""Helpers of all benches: the machine, medians with spread, the table, the JSON document."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["machine", "only_save", "p99", "publish", "spread", "table"]

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, str]:
    """Return processor, cores, memory and versions, to be published with the figures."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = next((line for line in cpuinfo.splitlines() if line.startswith("model name")), ":")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return {
        "cpu": model.split(":", 1)[1].strip(),
        "cores": str(os.cpu_count()),
        "memory_gib": f"{memory:.0f}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "microserve": version("microserve"),
    }


def spread(values: list[float], digits: int = 3) -> dict[str, float]:
    """Return minimum, median and maximum, with so many decimal places."""
    return {
        "min": round(min(values), digits),
        "median": round(statistics.median(values), digits),
        "max": round(max(values), digits),
    }


def p99(values: Sequence[float]) -> float:
    """Return the value that 99 % of the values do not exceed. There has to be one."""
    return sorted(values)[int(0.99 * (len(values) - 1))]


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table; the first column names the row, the others are figures."""
    view = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        view.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        view.add_row(*row)
    Console(width=100).print(view)


def only_save(doc: str) -> None:
    """Parse the options of a bench that has only `--help` and `--save`."""
    options = argparse.ArgumentParser(description=doc.partition("\n")[0])
    options.add_argument("--save", action="store_true", help="keep the figures in bench/results")
    options.parse_args()


def _command() -> str:
    """Return the command of this process."""
    module = sys.modules["__main__"].__spec__
    called = ["-m", module.name] if module else [sys.argv[0]]
    return shlex.join(["python", *called, *(flag for flag in sys.argv[1:] if flag != "--save")])


def publish(name: str, figures: dict[str, Any], *flags: str) -> None:
    """Print the document as the last line; with `--save`, also keep it under `bench/results/`.

    `flags` are options that change what the bench measures; its results then have their own name.
    """
    now = datetime.now(UTC)
    document = {
        **figures,
        "bench": name,
        "command": _command(),
        "date": now.isoformat(timespec="seconds"),
        "machine": machine(),
    }
    if "--save" in sys.argv:
        RESULTS.mkdir(exist_ok=True)
        kind = "".join(flag.replace("--", "_").replace(" ", "_") for flag in flags)
        path = RESULTS / f"{name}{kind}-{now:%Y-%m-%d}.json"
        path.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document))

"""Pictures of the figures, by matplotlib (extra `plot`): SVG, the same to the byte each time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from bench.figures.claims import Panel

__all__ = ["draw"]

SIZE = (3.6, 3.0)  # inches of a panel
STEEP = 30  # ratio of values from which an axis is logarithmic


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Draw panels beside each other. A dashed line has the colour of the line that it names."""
    mpl.use("Agg")
    from matplotlib import pyplot

    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "microserve", "font.size": 8}
    with mpl.rc_context(settings):
        width, height = SIZE
        figure, axes = pyplot.subplots(
            1, len(panels), figsize=(width * len(panels), height), squeeze=False
        )
        for axis, panel in zip(axes[0], panels, strict=True):
            plain = [label for label in panel.lines if label not in panel.dashed]
            for label, points in panel.lines.items():
                base = max((one for one in plain if label.startswith(one)), key=len)
                number = plain.index(base)
                axis.plot(
                    [x for x, _ in points], [y for _, y in points],
                    "--" if label in panel.dashed else "-",
                    marker=".", color=f"C{number}", label=label,
                )  # fmt: skip
            axis.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
            values = [y for points in panel.lines.values() for _, y in points]
            if max(values) > STEEP * min(values):
                axis.set_yscale("log")
            else:
                axis.set_ylim(bottom=0)
        axes[0][0].legend(fontsize=6)
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})
        pyplot.close(figure)

"""The tables of `docs/figures.md`, made from the documents in `bench/results/`.

A block of the page between `<!-- begin NAME -->` and `<!-- end -->` is what `render` returns for
that name. All else on the page is written by hand.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "RESULTS", "load", "render", "renewed"]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/figures.md"
RESULTS = ROOT / "bench/results"
VERDICTS = ("reproduced", "in direction", "not reproduced", "not simulated")
BLOCK = re.compile(r"(<!-- begin (.+?) -->\n).*?(<!-- end -->)", re.S)
Document = Mapping[str, Any]


def load() -> dict[str, Document]:
    """Return the saved documents by paper."""
    found = (json.loads(path.read_text()) for path in sorted(RESULTS.glob("figures_*.json")))
    return {document["paper"]: document for document in found}


def renewed(page: str, documents: Mapping[str, Document]) -> str:
    """Return the page with all blocks made again."""
    return BLOCK.sub(lambda each: f"{each[1]}\n{render(each[2], documents)}\n\n{each[3]}", page)


def render(name: str, documents: Mapping[str, Document]) -> str:
    """Return a block. Raises `KeyError` for one that does not exist."""
    kind, _, rest = name.partition(" ")
    if kind == "summary":
        return _summary(documents)
    parts = {key: part for one in documents.values() for key, part in one["parts"].items()}
    if kind == "claims":
        return _claims(parts[rest]["claims"])
    if kind == "points":
        key, _, tokens = rest.partition(" ")
        data = parts[key]["data"]
        return _points((data[tokens] if tokens else data)["points"])
    if kind == "rows":
        key, _, named = rest.partition(" ")
        rows = parts[key]["data"][named or "rows"]
        return _table(list(rows[0]), [[_cell(value) for value in row.values()] for row in rows])
    raise KeyError(name)


def _summary(documents: Mapping[str, Document]) -> str:
    rows = []
    for paper, document in documents.items():
        counts = Counter(
            next(iter(claim["answers"].values()))["verdict"]
            for part in document["parts"].values()
            for claim in part["claims"]
        )
        rows.append([paper, *(str(counts[verdict]) for verdict in VERDICTS)])
    return _table(["paper", *VERDICTS], rows)


def _claims(claims: Iterable[Mapping[str, Any]]) -> str:
    claims = list(claims)
    settings = list(dict.fromkeys(name for claim in claims for name in claim["answers"]))
    heads = ["", "the paper says"]
    for setting in settings:
        alone = len(settings) == 1
        heads += ["ours" if alone else setting, "verdict"]
    rows = []
    for claim in claims:
        row = [claim["figure"], claim["says"]]
        for setting in settings:
            answer = claim["answers"].get(setting)
            row += [answer["ours"], f"**{answer['verdict']}**"] if answer else ["", ""]
        rows.append([*row, claim["why"]])
    return _table([*heads, "how, and why"], rows)


def _points(points: Iterable[Mapping[str, Any]]) -> str:
    points = list(points)
    rates = sorted({point["rate"] for point in points})
    rows = []
    for arm, pattern in dict.fromkeys((point["arm"], point["pattern"]) for point in points):
        at = {p["rate"]: p for p in points if (p["arm"], p["pattern"]) == (arm, pattern)}
        cells = [f"{at[rate]['mean']['jct']:.0f} / {at[rate]['p99']['jct']:.0f}" for rate in rates]
        rows.append([arm, pattern, *cells])
    return _table(["", "mean / P99 JCT (ms) at", *(f"{rate:g}/s" for rate in rates)], rows)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, dict):  # a median with its spread
        return "{median:.4g} ({min:.4g}–{max:.4g})".format_map(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return "–" if value is None else str(value)

"""Make the papers' figures again: their numbers, pictures and tables.

Run: `make figures`, or `python -m bench.figures [PAPER …] [--tables]`. It takes some ten minutes on
one core, and a commit gives the same numbers on any machine. `--tables` computes nothing, and
only makes the tables of `docs/figures.md` again from the saved documents.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from bench.figures import code_lines, dejavu, distserve, infinite_llm, migration, serving
from bench.figures.claims import Part, rounded
from bench.figures.page import PAGE, RESULTS, load, renewed
from bench.figures.pictures import draw
from bench.report import table

PAPERS: Mapping[str, Mapping[str, Callable[[], Part]]] = {
    "microserving": {
        "figure-10": serving.figure_10,
        "figure-11": serving.figure_11,
        "figure-11-requests": serving.run_lengths,
        "figure-12": migration.figure_12,
        "figure-13": serving.figure_13,
        "table-3": migration.table_3,
        "programmability": code_lines.programmability,
    },
    "distserve": {
        "distserve-figure-1": distserve.figure_1,
        "distserve-figure-4": distserve.figure_4,
        "distserve-simulator": distserve.simulator,
        "distserve-table-3": distserve.placements,
        "distserve-figure-10": distserve.figure_10,
    },
    "dejavu": {
        "dejavu-tables-2-3": dejavu.splits,
        "dejavu-table-6": dejavu.table_6,
        "dejavu-makespan": dejavu.makespans,
        "dejavu-latency": dejavu.latency,
    },
    "infinite-llm": {"infinite-llm-table-1": infinite_llm.table_1},
}


def main() -> None:
    """Compute the papers' figures, and write what has changed."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("papers", nargs="*", metavar="PAPER", help=", ".join(PAPERS))
    options.add_argument(
        "--tables", action="store_true", help="only docs/figures.md, from what is saved"
    )
    given = options.parse_args()
    if unknown := set(given.papers) - set(PAPERS):
        options.error(f"no paper {', '.join(unknown)}; there are {', '.join(PAPERS)}")
    before = verdicts(load())
    for paper in () if given.tables else given.papers or PAPERS:
        document = make(paper)
        path = RESULTS / f"figures_{paper.replace('-', '_')}.json"
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    documents = load()
    PAGE.write_text(renewed(PAGE.read_text(), documents))
    after = verdicts(documents)
    kinds = list(dict.fromkeys(after.values()))
    rows = [
        [
            paper,
            *(str(sum(k[0] == paper and v == kind for k, v in after.items())) for kind in kinds),
        ]
        for paper in documents
    ]
    table("Verdicts, in all settings", ["paper", *kinds], rows)
    changed = [key for key in after if before.get(key, after[key]) != after[key]]
    for key in changed:
        print(f"changed: {' · '.join(key)}: {before[key]} → {after[key]}; read its “why” again")
    print(json.dumps({"bench": "figures", "claims": len(after), "changed": len(changed)}))


def make(paper: str) -> dict[str, Any]:
    """Compute the figures of a paper, draw its pictures and return its document."""
    parts = {}
    for name, compute in PAPERS[paper].items():
        began = time.monotonic()
        part = compute()
        for picture, panels in part.pictures.items():
            draw(panels, PAGE.parent / "figures" / f"{picture}.svg")
        parts[name] = {"claims": [asdict(claim) for claim in part.claims], "data": part.data}
        print(f"{paper}, {name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    command = f"python -m bench.figures {paper}"
    document: dict[str, Any] = rounded(
        {"bench": "figures", "paper": paper, "command": command, "parts": parts}
    )
    return document


def verdicts(documents: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, ...], str]:
    """Return all verdicts by paper, figure, claim and setting."""
    return {
        (paper, claim["figure"], claim["says"], setting): answer["verdict"]
        for paper, document in documents.items()
        for part in document["parts"].values()
        for claim in part["claims"]
        for setting, answer in claim["answers"].items()
    }


if __name__ == "__main__":
    main()

"""Make the papers' figures again: their numbers, pictures and tables.

Run: `make figures`, or `python -m bench.figures [NAME …] [--tables]`, where a name is that of a
paper or of one of its parts. All takes half an hour or more on one core, and a commit gives the
same numbers on any machine. `--tables` computes nothing, and only makes the tables of
`docs/figures.md` again from the saved documents.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from bench.figures import (
    code_lines,
    dejavu,
    distserve,
    distserve_load,
    infinite_llm,
    long_contexts,
    migration,
    real_engines,
    serving,
)
from bench.figures.claims import Part, rounded
from bench.figures.page import PAGE, RESULTS, load, renewed
from bench.figures.pictures import draw
from bench.report import table

PAPERS: Mapping[str, Mapping[str, Callable[[], Part]]] = {
    "microserving": {
        "figure-10": serving.figure_10,
        "figure-11": serving.figure_11,
        "figure-11-requests": serving.run_lengths,
        "figure-11-budgets": serving.token_budgets,
        "figure-12": migration.figure_12,
        "figure-13": serving.figure_13,
        "table-3": migration.table_3,
        "real-engines-load": real_engines.under_load,
        "real-engines-moves": real_engines.moves,
        "programmability": code_lines.programmability,
    },
    "distserve": {
        "distserve-figure-1": distserve_load.figure_1,
        "distserve-figure-4": distserve.figure_4,
        "distserve-simulator": distserve.simulator,
        "distserve-table-3": distserve.placements,
        "distserve-figure-8": distserve_load.figure_8,
        "distserve-figure-10": distserve_load.figure_10,
    },
    "dejavu": {
        "dejavu-tables-2-3": dejavu.splits,
        "dejavu-table-6": dejavu.table_6,
        "dejavu-makespan": dejavu.makespans,
        "dejavu-latency": dejavu.latency,
    },
    "infinite-llm": {
        "infinite-llm-table-1": infinite_llm.table_1,
        "infinite-llm-figure-8": long_contexts.figure_8,
        "infinite-llm-figure-10": long_contexts.figure_10,
    },
}


def main() -> None:
    """Compute the papers' figures, and write what has changed."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(PAPERS)}, or a part")
    options.add_argument(
        "--tables", action="store_true", help="only docs/figures.md, from what is saved"
    )
    given = options.parse_args()
    known = {*PAPERS, *(name for parts in PAPERS.values() for name in parts)}
    if unknown := set(given.names) - known:
        options.error(f"no {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    saved = load()
    before = verdicts(saved)
    for paper, parts in PAPERS.items():
        wanted = [name for name in parts if not given.names or {paper, name} & set(given.names)]
        if wanted and not given.tables:
            document = make(paper, wanted, saved.get(paper))
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


def make(paper: str, wanted: list[str], saved: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the document of a paper, with its `wanted` parts made again, and their pictures."""
    parts = {}
    for name, compute in PAPERS[paper].items():
        if name not in wanted:
            if saved is not None and name in saved["parts"]:
                parts[name] = saved["parts"][name]
            continue
        began = time.monotonic()
        part = compute()
        for picture, panels in part.pictures.items():
            draw(panels, PAGE.parent / "figures" / f"{picture}.svg")
        claims = [asdict(claim) for claim in part.claims]
        parts[name] = rounded({"claims": claims, "data": part.data})
        print(f"{paper}, {name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    command = f"python -m bench.figures {paper}"
    return {"bench": "figures", "paper": paper, "command": command, "parts": parts}


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

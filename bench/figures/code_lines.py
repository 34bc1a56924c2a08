"""Microserving, §4.1: programmability as the paper reports it, in lines of code."""

from __future__ import annotations

import ast
from pathlib import Path

from bench.figures.claims import Answer, Claim, Part

__all__ = ["count_lines", "programmability"]

ROOT = Path(__file__).parents[2]
LIBRARY = ("__init__", "controller")  # no strategies
# Those of the paper, and what is ours beyond it.
PAPER = ("data_parallel", "prefill_decode", "migrate", "balanced", "cache_aware")


def programmability() -> Part:
    """Lines of each strategy: of its file, and of the function that serves a request."""
    files = {
        path.stem: count_lines(path.read_text())
        for path in sorted((ROOT / "strategies").glob("*.py"))
    }
    strategies = {name: lines for name, lines in files.items() if name not in LIBRARY}
    paper = sum(files[name][0] for name in PAPER)
    five = files["data_parallel"][1]
    controller, total = files["controller"][0], sum(lines for lines, _ in files.values())
    claims = [
        Claim("§3.2", "data parallel takes 5 lines of Python",
              {"ours": Answer(f"{five} lines", "reproduced" if five <= 5 else "not reproduced")},
              "The function with its decorator, without docstring."),
        Claim("§3.6", "all strategies take 350 lines of Python",
              {"ours": Answer(f"{paper} lines for the paper's, {total} for all of ours",
                              "reproduced" if paper <= 350 else "not reproduced")},
              f"Without blank lines, comments and docstrings. The {controller} lines of "
              "`strategies/controller.py` (the rule of `auto`), `adaptive` and `replicate` have no "
              "counterpart in the paper."),
    ]  # fmt: skip
    data = {
        "strategies": {
            name: {"file": lines, "function": function}
            for name, (lines, function) in strategies.items()
        },
        "controller": controller,
    }
    return Part(data, claims)


def count_lines(source: str) -> tuple[int, int]:
    """Return the lines with code of a module, and those of its function with a `@strategy`.

    Blank lines, comments and docstrings do not count; the function's own decorator does. The second
    number is 0 without such a function.
    """
    tree = ast.parse(source)
    lines = source.splitlines()
    code = {
        number
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.strip().startswith("#")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = node.body[0] if node.body and ast.get_docstring(node) is not None else None
            if text is not None:
                code -= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    served = [
        set(range(node.decorator_list[0].lineno, (node.end_lineno or node.lineno) + 1))
        for node in tree.body
        if isinstance(node, ast.AsyncFunctionDef)
        and any(ast.unparse(one) == "strategy" for one in node.decorator_list)
    ]
    return len(code), len(code & served[0]) if served else 0

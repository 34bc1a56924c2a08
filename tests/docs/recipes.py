"""Follows the recipes in docs/tour.md, in a copy of the tree.

Run as a program, this checks the style and the types of what they write; `make check` does so.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tour.md").read_text()
COPIED = ("router", "engine", "kvcache", "strategies", "tests", "pyproject.toml")
RECIPES = dict(re.findall(r"^### (An? [^\n]+)\n(.*?)(?=^##|\Z)", PAGE, re.S | re.M))
# A file name and the block that creates or changes the file; several blocks may follow one name.
FILE = re.compile(
    r"^`([\w/]+\.py)`(?: \(new\))?:\n((?:\n```(?:python|diff)\n.*?\n```\n)+)", re.S | re.M
)
BLOCK = re.compile(r"```(python|diff)\n(.*?\n)```\n", re.S)


def changed(text: str, diff: str) -> str:
    """Return `text` with the one place that `diff` describes replaced."""
    lines = diff.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    assert text.count(before) == 1, f"not exactly once in the file:\n{before}"
    return text.replace(before, after)


def follow(recipe: str, tree: Path) -> list[str]:
    """Write and change the recipe's files; return pytest's arguments for its test."""
    for name, blocks in FILE.findall(recipe):
        path = tree / name
        for kind, code in BLOCK.findall(blocks):
            if kind == "python":
                assert not path.exists(), f"{name} exists"
                path.parent.mkdir(exist_ok=True)
                path.write_text(code)
            else:
                path.write_text(changed(path.read_text(), code))
    (command,) = re.findall(r'^make test PYTEST=(".+"|\S+)$', recipe, re.M)
    return shlex.split(command.strip('"'))


def follow_all(tree: Path) -> list[list[str]]:
    """Copy the project to `tree` and follow all recipes; return pytest's arguments for each."""
    ignored = shutil.ignore_patterns("__pycache__", ".*_cache")
    for part in COPIED:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, tree / part, ignore=ignored)
        else:
            shutil.copy(source, tree / part)
    return [follow(recipe, tree) for recipe in RECIPES.values()]


def run(tree: Path, *arguments: str) -> None:
    """Run a Python module in `tree`; it must succeed."""
    ended = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def main() -> None:
    files = [name for recipe in RECIPES.values() for name, _ in FILE.findall(recipe)]
    typed = [name for name in files if not name.startswith("tests/")]
    with tempfile.TemporaryDirectory() as folder:
        follow_all(Path(folder))
        run(Path(folder), "ruff", "format", "--check", *files)
        run(Path(folder), "ruff", "check", *files)
        if (known := ROOT / ".mypy_cache").exists():
            # With what the check of the project has found, mypy takes a tenth of the time.
            shutil.copytree(known, Path(folder) / ".mypy_cache")
        run(Path(folder), "mypy", *typed)
    print(f"{len(RECIPES)} recipes of docs/tour.md checked")


if __name__ == "__main__":
    main()

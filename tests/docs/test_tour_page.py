"""Every recipe in docs/tour.md, followed literally in a copy of the tree."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tour.md").read_text()
COPIED = ("router", "engine", "kvcache", "strategies", "tests", "pyproject.toml")
RECIPES = dict(re.findall(r"^### (An? [^\n]+)\n(.*?)(?=^##|\Z)", PAGE, re.S | re.M))
# A file name and the block that creates or changes the file; several blocks may follow one name.
FILE = re.compile(
    r"^`([\w/]+\.py)`(?: \(new\))?:\n((?:\n```(?:python|diff)\n.*?\n```\n)+)", re.S | re.M
)
BLOCK = re.compile(r"```(python|diff)\n(.*?\n)```\n", re.S)

pytestmark = [pytest.mark.slow, pytest.mark.processes]


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


def test_all_recipes_are_found():
    kinds = ["A strategy", "A model family", "A transport", "An attention backend", "A page store"]
    assert list(RECIPES) == kinds


def test_the_recipes_work(tmp_path: Path):
    """All recipes share one tree and one run: importing torch takes longer than the tests."""
    ignored = shutil.ignore_patterns("__pycache__", ".*_cache")
    for part in COPIED:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, tmp_path / part, ignore=ignored)
        else:
            shutil.copy(source, tmp_path / part)
    files, chosen = [], []
    for recipe in RECIPES.values():
        file, *select = follow(recipe, tmp_path)
        files.append(file)
        chosen.append(select[-1] if select else Path(file).stem)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *files, "-k", " or ".join(chosen)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert run.returncode == 0, run.stdout + run.stderr

"""Every recipe in docs/tour.md, followed literally in a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tour.md").read_text()
COPIED = ("router", "engine", "kvcache", "strategies", "tests", "pyproject.toml")
RECIPES = dict(re.findall(r"^### (An? [^\n]+)\n(.*?)(?=^##|\Z)", PAGE, re.S | re.M))
# A file, and the block that is in it or changes it; several blocks may follow one file.
FILE = re.compile(
    r"^`([\w/]+\.py)`(?: \(new\))?:\n((?:\n```(?:python|diff)\n.*?\n```\n)+)", re.S | re.M
)
BLOCK = re.compile(r"```(python|diff)\n(.*?\n)```\n", re.S)

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def changed(text: str, diff: str) -> str:
    """`text` after the one place that `diff` describes has been replaced."""
    lines = diff.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    assert text.count(before) == 1, f"not exactly once in the file:\n{before}"
    return text.replace(before, after)


def follow(recipe: str, tree: Path) -> list[str]:
    """Write and change the recipe's files; returns its tests."""
    tests = []
    for name, blocks in FILE.findall(recipe):
        path = tree / name
        for kind, code in BLOCK.findall(blocks):
            if kind == "python":
                assert not path.exists(), f"{name} exists"
                path.write_text(code)
            else:
                path.write_text(changed(path.read_text(), code))
        if path.name.startswith("test_"):
            tests.append(name)
    return tests


def test_all_recipes_are_found():
    assert list(RECIPES) == ["A strategy", "A model family"]


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name: str, tmp_path: Path):
    ignored = shutil.ignore_patterns("__pycache__", ".*_cache")
    for part in COPIED:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, tmp_path / part, ignore=ignored)
        else:
            shutil.copy(source, tmp_path / part)
    tests = follow(RECIPES[name], tmp_path)
    assert tests
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stdout + run.stderr

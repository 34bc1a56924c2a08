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


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """Return a copy of the tree in which all recipes are followed, and pytest's arguments."""
    tree = tmp_path_factory.mktemp("tour")
    ignored = shutil.ignore_patterns("__pycache__", ".*_cache")
    for part in COPIED:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, tree / part, ignore=ignored)
        else:
            shutil.copy(source, tree / part)
    return tree, [follow(recipe, tree) for recipe in RECIPES.values()]


def test_the_recipes_work(followed):
    """All recipes share one tree and one run: importing torch takes longer than the tests."""
    tree, commands = followed
    chosen = [select[-1] if select else Path(file).stem for file, *select in commands]
    run(tree, "pytest", "-q", *(file for file, *_ in commands), "-k", " or ".join(chosen))


def test_the_recipes_pass_the_checks_of_style_and_types(followed):
    tree, _ = followed
    files = [name for recipe in RECIPES.values() for name, _ in FILE.findall(recipe)]
    run(tree, "ruff", "format", "--check", *files)
    run(tree, "ruff", "check", *files)
    run(tree, "mypy", *(name for name in files if not name.startswith("tests/")))

"""Each folder is a package with a stated purpose, a bounded size, and an `__init__` that exports.

import-linter holds the order of the rooms (`make check`). These tests hold what it cannot: rooms
that export names are imported by these names, not by their modules.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("router", "engine", "kvcache", "strategies")
MAX_MODULES = 14
ROOMS = sorted(init.parent for name in PACKAGES for init in (ROOT / name).rglob("__init__.py"))


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def exports(room: Path) -> bool:
    tree = ast.parse((room / "__init__.py").read_text())
    return any(
        isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for node in tree.body
    )


EXPORTING = {dotted(room) for room in ROOMS if exports(room)} - set(PACKAGES)


def imports_at_start(module: Path) -> Iterator[tuple[int, str]]:
    """Line and name of each module that is imported from while `module` is imported or checked."""
    for node in ast.parse(module.read_text()).body:
        for inner in node.body if isinstance(node, ast.If) else [node]:
            if isinstance(inner, ast.ImportFrom) and inner.module:
                yield inner.lineno, inner.module


@pytest.mark.parametrize("room", ROOMS, ids=dotted)
def test_a_room_has_a_docstring_and_is_small(room: Path):
    said = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
    assert said and len(said) > 20
    modules = [
        path for path in room.glob("*.py") if path.name not in ("__init__.py", "__main__.py")
    ]
    assert len(modules) <= MAX_MODULES


@pytest.mark.parametrize("room", ROOMS, ids=dotted)
def test_rooms_import_each_other_by_their_exports(room: Path):
    here = dotted(room)
    for module in room.glob("*.py"):
        for line, name in imports_at_start(module):
            entered = name.rpartition(".")[0]
            inside = f"{here}.".startswith(f"{entered}.") or f"{entered}.".startswith(f"{here}.")
            assert inside or entered not in EXPORTING, f"{module}:{line} imports {name}"

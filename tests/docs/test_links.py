"""The pages name only what exists: links, anchors, files, folders, and names in modules."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PACKAGES = ("router", "engine", "kvcache", "strategies")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w-][\w.-]*(/[\w.-]+)+\.(py|md|json|toml|txt)")
FOLDER = re.compile(r"([\w-][\w.-]*/)+")
DOTTED = re.compile(rf"({'|'.join(PACKAGES)})(\.\w+)+")
NEW = re.compile(r"^`([\w/]+\.py)` \(new\):$", re.M)
RATHER_A_FILE = (".py", ".md", ".json", ".toml", ".txt", ".env", ".yaml")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def prose(page: Path) -> str:
    """Return the page's text without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.S | re.M)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub derives from the page's headings."""
    headings = re.findall(r"^#+ +(.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@cache
def names(module: Path) -> frozenset[str]:
    """Return what a module defines: `name`, `Class.name`, and attributes set in `__init__`."""
    found: set[str] = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.ClassDef(name=name):
                    found.add(prefix + name)
                    visit(child, f"{prefix}{name}.")
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.add(prefix + name)
                    if prefix:
                        visit(child, prefix)
                case ast.Assign(targets=targets):
                    for target in targets:
                        assigned(target, prefix)
                case ast.AnnAssign(target=target):
                    assigned(target, prefix)
                case ast.ImportFrom(names=imported) | ast.Import(names=imported):
                    found.update(prefix + (item.asname or item.name) for item in imported)
                case _:
                    visit(child, prefix)

    def assigned(target: ast.expr, prefix: str) -> None:
        match target:
            case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name):
                found.add(prefix + name)
            case ast.Tuple(elts=parts):
                for part in parts:
                    assigned(part, prefix)

    visit(ast.parse(module.read_text()), "")
    return frozenset(found)


def resolves(dotted: str) -> bool:
    """Return whether `package.module.name` is a module, or a name in one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if module.exists():
            return length == len(parts) or ".".join(parts[length:]) in names(module)
    return False


@pages
def test_relative_links_and_anchors_resolve(page: Path):
    for link in LINK.findall(prose(page)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}"


@pages
def test_files_folders_and_modules_exist(page: Path):
    bases = [ROOT, *(ROOT / package for package in PACKAGES)]
    made = set(NEW.findall(page.read_text()))  # files that the reader creates by following the page
    for code in CODE.findall(prose(page)):
        if FILE.fullmatch(code) or FOLDER.fullmatch(code):
            there = code in made or any((base / code).exists() for base in bases)
            assert there, f"{page.name}: {code}"
        elif DOTTED.fullmatch(code) and not code.endswith(RATHER_A_FILE):
            assert resolves(code), f"{page.name}: {code}"


@pages
def test_names_beside_a_module_are_in_it(page: Path):
    """A table row that begins with modules lists names of them in its second column."""
    rows = r"^\| (`\w+/[\w/]+\.py`(?:, `\w+/[\w/]+\.py`)*) \| (.*?) \|"
    for row in re.findall(rows, prose(page), re.M):
        modules = [ROOT / path for path in CODE.findall(row[0])]
        known = {name for module in modules for name in names(module)}
        for name in CODE.findall(row[1]):
            assert name in known, f"{page.name}: {name} is not in {row[0]}"

"""Which tests run which lines: a mutant needs no others."""

from __future__ import annotations

import ast
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

Reached = dict[str, dict[int, list[str]]]  # by module and line, names of tests


class Recorder:
    """A plugin of pytest that records which lines of some modules each test runs."""

    def __init__(self, folder: Path, modules: list[str]) -> None:
        from coverage import Coverage

        self._folder = folder
        self._modules = modules
        self._coverage = Coverage(data_file=None, include=[str(folder / each) for each in modules])
        self._seconds: dict[str, float] = defaultdict(float)

    def start(self) -> None:
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._coverage.switch_context("")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        """Count what a shared fixture runs for all tests of the file."""
        shared = fixturedef.scope in ("class", "module", "package", "session")
        item = request._pyfuncitem.nodeid
        if shared:
            self._coverage.switch_context(_file(item))
        try:
            return (yield)
        finally:
            if shared:
                self._coverage.switch_context(item)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def write(self, path: Path) -> None:
        self._coverage.stop()
        data = self._coverage.get_data()
        reached = {
            module: data.contexts_by_lineno(str(self._folder / module)) for module in self._modules
        }
        path.write_text(json.dumps({"seconds": self._seconds, "reached": reached}))


class Reach:
    """Tells which tests reach a line."""

    def __init__(self, path: Path) -> None:
        document = json.loads(path.read_text())
        self._seconds: dict[str, float] = document["seconds"]
        self._reached: Reached = {
            module: {int(line): [name for name in names if name] for line, names in lines.items()}
            for module, lines in document["reached"].items()
        }

    def seconds(self, tests: list[str]) -> float:
        """Return how long these tests take."""
        return sum(self._seconds.get(name, 0.0) for name in tests)

    def files(self, module: str) -> list[str]:
        """Return the files with tests that run any line of a module."""
        reached = {name for names in self._reached[module].values() for name in names}
        return sorted({_file(name) for name in reached})

    def within_seconds(self, tests: list[str], limit_s: float) -> list[str]:
        """Return the first of `tests`, as many as end in `limit_s`; at least one."""
        until = list(accumulate(self._seconds.get(name, 0.0) for name in tests))
        return tests[: max(1, bisect_right(until, limit_s))]

    @staticmethod
    def in_function(source: str, line: int) -> bool:
        """Whether the statement at `line` runs when a function is called, not at import."""
        return _statement(ast.parse(source), line) is not None

    def tests(self, module: str, source: str, line: int) -> list[str]:
        """Return the tests that run the statement at `line`, file by file.

        The module's own file comes first, then the quickest.
        """
        lines = self._reached[module]
        tree = ast.parse(source)
        span = _statement(tree, line)
        # What runs at import matters to all tests of the module.
        reached = self._names(module, range(span[0], span[1] + 1) if span else lines)
        if not reached and span is not None:
            # Coverage does not see the lines that follow an error thrown into a coroutine.
            reached = self._names(module, _function(tree, line))
        names = {name for name in self._seconds if name in reached or _file(name) in reached}
        if not names and span is None:  # a module of constants runs in no test
            names = set(self._seconds)
        cost: dict[str, float] = defaultdict(float)
        for name in names:
            cost[_file(name)] += self._seconds[name]
        return sorted(
            names,
            key=lambda name: (
                Path(module).stem not in _file(name), cost[_file(name)], _file(name),
                self._seconds[name], name,
            ),
        )  # fmt: skip

    def _names(self, module: str, lines: Iterable[int]) -> set[str]:
        return {name for line in lines for name in self._reached[module].get(line, ())}


class Chosen:
    """A plugin of pytest that runs some tests in their order and no others."""

    def __init__(self, names: list[str]) -> None:
        self._rank = {name: rank for rank, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._rank]
        items.sort(key=lambda item: self._rank[item.nodeid])


def _file(test: str) -> str:
    return test.partition("::")[0]


def _statement(tree: ast.Module, line: int) -> tuple[int, int] | None:
    """Return the lines of the statement at `line`; `None` if it runs at import.

    Of a compound statement these are the lines before its body.
    """
    best: tuple[int, int] | None = None
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in function.body:
                for each in ast.walk(node):
                    if isinstance(each, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                        first, last = _span(each)
                        if first <= line <= last and (best is None or first >= best[0]):
                            best = first, last
    return best


def _function(tree: ast.Module, line: int) -> range:
    """Return the lines of the innermost function at `line`."""
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    inner = max(functions, key=lambda node: node.lineno)
    return range(inner.lineno, (inner.end_lineno or inner.lineno) + 1)


def _span(node: Any) -> tuple[int, int]:
    body = getattr(node, "body", None)
    first = node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno
    if not isinstance(body, list):
        return first, node.end_lineno
    return first, max(first, body[0].lineno - 1)

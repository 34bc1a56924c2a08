"""Find the tests that start processes, so that they need no marks by hand.

A test counts if its code, or a fixture or helper that it uses, refers to a module or class that
starts processes.
"""

from __future__ import annotations

import inspect
import multiprocessing
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
from forked import ForkedProcess

TESTS = Path(__file__).parent
ALWAYS = (TESTS / "e2e", TESTS / "conformance")
MODULES = (subprocess, multiprocessing)
_harmless: set[int] = set()  # ids of functions and classes that are known not to


def starts_processes(item: pytest.Item) -> bool:
    """Return whether the test may start a process or use one that a fixture has started."""
    if any(item.path.is_relative_to(folder) for folder in ALWAYS):
        return True
    fixtures = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009  not in Item
    functions = [getattr(item, "function", None), *(f.func for defs in fixtures for f in defs)]
    seen = set(_harmless)
    if any(_refers(function, seen) for function in functions):
        return True
    _harmless.update(seen)
    return False


def _refers(used: Any, seen: set[int]) -> bool:
    """Return whether a function, class or module refers to one that starts processes."""
    if id(used) in seen:
        return False
    seen.add(id(used))
    of_multiprocessing = type(used).__module__.startswith("multiprocessing.")
    if of_multiprocessing or any(used is module for module in MODULES):
        return True  # a module, a context or a process that a test module keeps
    if inspect.isclass(used) and issubclass(used, ForkedProcess):
        return True
    if inspect.isclass(used) and _is_ours(used):
        return any(_refers(member, seen) for member in vars(used).values())
    function = inspect.unwrap(used) if callable(used) else used
    if not inspect.isfunction(function) or not _is_ours(function):
        return False
    names = set(_names(function.__code__))
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    for module in [each for each in found if isinstance(each, ModuleType)]:
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(TESTS):
            found += [getattr(module, name) for name in names if hasattr(module, name)]
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return any(_refers(each, seen) for each in (*found, *cells))


def _is_ours(used: Any) -> bool:
    try:
        return Path(inspect.getfile(used)).is_relative_to(TESTS)
    except (OSError, TypeError):
        return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)

"""The strategies that can be activated: those installed, and those loaded from source."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import CodeType
from typing import Any

from engine.protocol import BadRequest
from router.errors import Conflict, NotFound, root_cause
from router.strategy import Strategy

__all__ = ["Catalog"]

_modules = itertools.count()


class Catalog:
    """Strategies by name. Installed ones are entry points of the group `microserve.strategies`."""

    def __init__(self) -> None:
        self._installed: dict[str, Strategy] = {}
        self._loaded: dict[str, Strategy] = {}
        for entry in entry_points(group="microserve.strategies"):
            found = entry.load()
            if not isinstance(found, Strategy):
                raise TypeError(f"the entry point {entry.name} is no strategy but {found!r}")
            self._installed[entry.name] = found

    def __getitem__(self, name: str) -> Strategy:
        """Raises `NotFound`, naming what there is."""
        found = self._loaded.get(name) or self._installed.get(name)
        if found is None:
            known = ", ".join(sorted({**self._installed, **self._loaded}))
            raise NotFound(f"no strategy {name!r}; there are: {known}", param="name")
        return found

    def load_file(self, path: Path) -> Strategy:
        """Load the strategies in a file; the one returned is its only one, or named like it.

        Raises `BadRequest` if the file cannot be read or is not what it should be.
        """
        try:
            source = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequest(f"{path}: {error}", param="source") from None
        return self.load_source(path.stem, source, where=str(path), only=True)

    def load_source(
        self, name: str, source: str, *, where: str = "", only: bool = False
    ) -> Strategy:
        """Run `source` and list its strategies; returns the one called `name`.

        `only`: where there is one strategy in it, any name will do. Raises `BadRequest` with what
        went wrong, `Conflict` for the name of an installed strategy.
        """
        where = where or f"<strategy {name}>"
        found = {one.name: one for one in _run(source, where)}
        chosen = found.get(name)
        if chosen is None and only and len(found) == 1:
            chosen = next(iter(found.values()))
        if chosen is None:
            has = ", ".join(sorted(found)) or "none"
            raise BadRequest(f"{where}: no strategy {name!r} in it; it has: {has}", param="source")
        if taken := sorted(found.keys() & self._installed.keys()):
            raise Conflict(f"{where}: {taken[0]} is the name of an installed strategy")
        self._loaded.update(found)
        return chosen

    def describe(self) -> list[dict[str, Any]]:
        return [
            {**found.describe(), "installed": name in self._installed}
            for name, found in sorted({**self._installed, **self._loaded}.items())
        ]


class _Source(importlib.abc.InspectLoader):
    def __init__(self, source: str, where: str) -> None:
        self._source = source
        self._where = where

    def get_source(self, fullname: str) -> str:
        return self._source

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._source, self._where)


def _run(source: str, where: str) -> list[Strategy]:
    name = f"microserve_strategy_{next(_modules)}"
    loader = _Source(source, where)
    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, loader))
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        cause = root_cause(error)
        raise BadRequest(f"{where}: {type(cause).__name__}: {cause}", param="source") from error
    return [
        found
        for found in vars(module).values()
        if isinstance(found, Strategy) and found.function.__module__ == name
    ]

"""The strategies that can be activated: installed ones, and ones loaded from source."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import logging
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

from engine.protocol import MOST_MESSAGE, BadRequest, MicroserveError, Timeout
from router.base import Conflict, NotFound, import_from, root_cause
from router.rollout.source_error import SourceError, place_of
from router.strategy import Strategy
from router.supervision import UserThreads

__all__ = ["Catalog", "read_source"]

log = logging.getLogger(__name__)
_modules = itertools.count()


class Catalog:
    """Strategies by name. Installed ones are entry points of the group `microserve.strategies`."""

    def __init__(self) -> None:
        self._installed: dict[str, Strategy] = {}
        self._loaded: dict[str, Strategy] = {}
        # Of loaded ones, with the names of their files; also of replaced ones that still run.
        self._sources: WeakKeyDictionary[Strategy, tuple[str, str]] = WeakKeyDictionary()
        self._threads = UserThreads()
        for entry in entry_points(group="microserve.strategies"):
            try:
                found = entry.load()
            except Exception as error:  # noqa: BLE001  one broken package must not affect the others
                log.warning("the strategy %s cannot be imported: %s", entry.value, error)
                continue
            if isinstance(found, Strategy):
                self._installed[entry.name] = found
            else:
                log.warning("the entry point %s is no strategy: %r", entry.value, found)

    def __getitem__(self, name: str) -> Strategy:
        """Return the strategy of this name. Raises `NotFound`, naming the known ones."""
        found = self._loaded.get(name) or self._installed.get(name)
        if found is None:
            known = ", ".join(sorted({**self._installed, **self._loaded}))
            raise NotFound(f"no strategy {name!r}; there are: {known}", param="name")
        return found

    def find(self, name: str) -> Strategy:
        """Return the strategy of this name, or that of the file at this path, which ends in `.py`.

        A file may import modules that lie beside it. Raises `NotFound`, and what `load` raises.
        """
        if not name.endswith(".py"):
            return self[name]
        source = read_source(Path(name))
        import_from(Path(name).absolute().parent)
        return self.load(source, file=name)

    def load(self, source: str, *, name: str = "", file: str = "") -> Strategy:
        """Run `source`, list its strategies by their functions' names, and return the chosen one.

        That is the strategy `name`. Without `name` it is the only strategy, or of several the one
        named like the file. Raises `BadRequest` with the error and its line, and `Conflict` for the
        name of an installed strategy; nothing is listed then.
        """
        where = file or f"<strategy {name}>"
        return self._list(_run(source, where), source, where, name, file)

    async def load_in_thread(
        self, source: str, *, name: str = "", file: str = "", limit_s: float
    ) -> Strategy:
        """Do the same, with the source in a daemon thread, which the process does not wait for.

        Raises `Timeout` after `limit_s` seconds. The thread is interrupted then; while one runs on
        all the same, the next call raises `Conflict`.
        """
        where = file or f"<strategy {name}>"
        found = await self.run_in_thread(source, where, limit_s=limit_s)
        return self._list(found, source, where, name, file)

    async def run_in_thread(self, source: str, where: str, *, limit_s: float) -> list[Strategy]:
        """Return the strategies of `source`, without listing them. Raises as `load_in_thread`."""
        if self._threads.late:
            raise Conflict("an earlier upload still runs and cannot be stopped: restart the router")
        late = False

        def work() -> list[Strategy]:
            found = _run(source, where)
            if late:
                _forget(found)
            return found

        try:
            return await self._threads.run(f"import of {where}", work, limit_s=limit_s)
        except TimeoutError:
            raise Timeout(f"{where}: loading took more than {limit_s:g} s") from None
        finally:
            late = True

    def source(self, name: str) -> tuple[str, str]:
        """Return the source of a loaded strategy, and its file or ""; an installed one has "", "".

        Raises `NotFound`.
        """
        return self.source_of(self[name])

    def source_of(self, strategy: Strategy) -> tuple[str, str]:
        """Return the same of a strategy that may have been replaced since it was loaded."""
        if (found := self._sources.get(strategy)) is not None:
            return found
        return ("", "") if self.is_installed(strategy) else (strategy.source, "")

    def is_installed(self, strategy: Strategy) -> bool:
        """Return whether a strategy is an installed one, and not loaded from source."""
        return any(one is strategy for one in self._installed.values())

    def names_with(self, strategy: Strategy) -> list[str]:
        """Return the listed strategies that come from the same source as a loaded one."""
        module = strategy.function.__module__
        return [name for name, one in self._loaded.items() if one.function.__module__ == module]

    def _list(
        self, strategies: list[Strategy], source: str, where: str, name: str, file: str
    ) -> Strategy:
        """List the strategies of one source; return the chosen one. Raises as `load` does."""
        try:
            chosen = self._choose({one.name: one for one in strategies}, where, name, file)
        except MicroserveError:
            _forget(strategies)
            raise
        self._sources.update(dict.fromkeys(strategies, (source, file)))
        return chosen

    def _choose(self, found: dict[str, Strategy], where: str, name: str, file: str) -> Strategy:
        wanted = name or Path(file).stem
        chosen = found.get(wanted)
        if chosen is None and not name and len(found) == 1:
            chosen = next(iter(found.values()))
        if chosen is None:
            has = ", ".join(sorted(found)) or "none"
            raise SourceError(f"{where}: no strategy {wanted!r} in it; it has: {has}")
        if taken := sorted(found.keys() & self._installed.keys()):
            raise Conflict(f"{where}: {taken[0]} is the name of an installed strategy")
        replaced = {self._loaded[one].function.__module__ for one in found if one in self._loaded}
        self._loaded.update(found)
        for module in replaced - {one.function.__module__ for one in self._loaded.values()}:
            sys.modules.pop(module, None)  # running requests keep their own references
        return chosen

    def describe(self) -> list[dict[str, Any]]:
        return [
            {**found.describe(), "installed": name in self._installed}
            for name, found in sorted({**self._installed, **self._loaded}.items())
        ]


def read_source(path: Path) -> str:
    """Return the text of a strategy file. Raises `BadRequest` if it cannot be read."""
    try:
        return path.read_text()
    except OSError as error:
        raise BadRequest(f"{path}: {error.strerror}", param="source") from None
    except UnicodeDecodeError:
        raise BadRequest(f"{path}: no text in UTF-8", param="source") from None


def _refused(where: str, source: str, error: BaseException) -> SourceError:
    """Return the error that says `FILE:LINE: ERROR`, in one line."""
    place = place_of(error, source, where)
    said = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    message = f"{where}:{place.line or 1}: {type(error).__name__}: {said[:MOST_MESSAGE]}"
    syntax = isinstance(error, SyntaxError) and error.filename in (where, None)
    return SourceError(message, kind="syntax" if syntax else "load", place=place)


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
    sys.modules[name] = module  # dataclasses look up their module there
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        cause = root_cause(error)
        raise _refused(where, source, cause) from error
    except BaseException:
        sys.modules.pop(name, None)
        raise
    found = [
        found
        for found in vars(module).values()
        if isinstance(found, Strategy) and found.function.__module__ == name
    ]
    if not found:
        sys.modules.pop(name, None)
    return found


def _forget(strategies: list[Strategy]) -> None:
    """Drop the module of strategies that are not listed."""
    for one in strategies:
        sys.modules.pop(one.function.__module__, None)

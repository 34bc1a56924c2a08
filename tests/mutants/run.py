"""Mutation tests: change the source a little, again and again, and see whether a test fails.

`make mutants` takes the modules that guard something (`modules.toml`). Each mutant is one small
change. The tests of its room run on a copy of the project, without those that start processes. A
mutant is killed if a test fails or does not end. A survivor gets a test, or a line in
`survivors.toml` that says why the change makes no difference.

The mutants of a module come in a random order that is always the same. A module gets `--minutes`,
so that a short run sees a sample. With `--save` the scores go to `score.json`.

How it is fast: one process imports the libraries, then forks per mutant. A mutant meets only the
tests that run its line: first the module's own, then the quickest (`reach.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import in_place
import pytest
from find_mutants import Mutant, Place, mutant, places
from reach import Chosen, Reach, Recorder

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
COPIED = ("router", "engine", "kvcache", "strategies", "tests", "docs", "examples", "bench")
FILES = ("pyproject.toml", "README.md", "Makefile")
# Imported before the forks. None of the project's own modules may be among them.
LIBRARIES = (
    "aiohttp", "fastapi", "httptools", "httpx", "hypothesis", "hypothesis.stateful", "msgspec",
    "numpy", "numba", "orjson", "prometheus_client", "pydantic", "pytest", "pytest_asyncio",
    "pytest_timeout", "tokenizers", "torch", "uvicorn", "uvloop", "watchfiles", "jinja2",
)  # fmt: skip
GOAL = 0.85
NO_MUTANT = 77  # status of a child whose change gives no Python, or cannot be made in place
TESTS_S = 12.0  # for each mutant: further tests are left out, as if they noticed nothing
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=no")
NOT_PROCESSES = "not processes and not conformance"


@dataclass
class Room:
    """Modules, and the tests that must notice a change to them."""

    name: str
    modules: list[str]
    tests: list[str]


@dataclass
class Score:
    """The outcomes of one module's mutants."""

    total: int  # mutants that there are, tried or not
    killed: int = 0
    explained: int = 0
    survivors: list[Mutant] = field(default_factory=list)

    @property
    def tried(self) -> int:
        return self.killed + self.explained + len(self.survivors)

    @property
    def share(self) -> float:
        """The killed ones of those that can be killed."""
        return self.killed / max(1, self.tried - self.explained)


class Slot:
    """A copy of the project in which one mutant at a time is tested."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        for name in FILES:
            shutil.copy(ROOT / name, folder / name)

    def begin(self, module: str, place: Place, tests: list[str]) -> int:
        """Run `tests` in a child process, on the module changed at `place`; return its pid."""
        source = (ROOT / module).read_text()

        def run() -> int:
            if (one := mutant(source, place)) is None:
                return NO_MUTANT
            path = self.folder / module
            path.write_text(one.source)
            try:
                return run_tests(tests)
            finally:
                path.write_text(source)

        return self._fork(run)

    def imported(self, tests: list[str]) -> None:
        """Import these files of tests, and what they import, for `begin_in_place`."""
        self._enter()
        with (self.folder / "log").open("w") as log, contextlib.redirect_stdout(log):
            pytest.main([*PYTEST, "--collect-only", *tests])
        gc.freeze()

    def begin_in_place(self, module: str, place: Place, tests: list[str]) -> int:
        """Do what `begin` does, by giving the functions of the imported module new code."""
        source = (ROOT / module).read_text()

        def run() -> int:
            gc.unfreeze()
            if (one := mutant(source, place)) is None:
                return NO_MUTANT
            if not in_place.replace(str(self.folder / module), one.source):
                return NO_MUTANT
            return run_tests(tests)

        return self._fork(run)

    def record(self, room: Room) -> Reach:
        """Run the room's tests on the unchanged code. Ends the program if they fail."""
        path = self.folder / "reach.json"

        def run() -> int:
            recorder = Recorder(self.folder, room.modules)
            recorder.start()
            status = pytest.main([*PYTEST, "-m", NOT_PROCESSES, *room.tests], plugins=[recorder])
            recorder.write(path)
            return status

        _, status = os.waitpid(self._fork(run), 0)
        if status:
            sys.exit(f"the tests of {room.name} fail without a mutant:\n{self.log()[-3000:]}")
        return Reach(path)

    def _fork(self, run: Callable[[], int]) -> int:
        if pid := os.fork():
            return pid
        status = 3
        try:
            os.setsid()
            self._enter()
            with (self.folder / "log").open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            status = int(run())
        finally:
            os._exit(status)

    def _enter(self) -> None:
        os.chdir(self.folder)
        os.environ["PYTHONPATH"] = str(self.folder)
        os.environ["OMP_NUM_THREADS"] = "1"
        sys.dont_write_bytecode = True
        sys.path[:] = [
            str(self.folder),
            *(path for path in sys.path if path not in ("", str(ROOT), str(HERE))),
        ]

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")


def run_tests(tests: list[str]) -> int:
    files = sorted({test.partition("::")[0] for test in tests})
    return pytest.main([*PYTEST, *files], plugins=[Chosen(tests)])


Begin = Callable[[str, Place, list[str]], int]


def trial(begin: list[Begin], module: str, there: list[Place], reach: Reach,
          until: float) -> Iterator[tuple[Place, bool]]:  # fmt: skip
    """Yield each place with whether its mutant was killed, as many as fit before `until`.

    Each function of `begin` starts one test process at a time.
    """
    source = (ROOT / module).read_text()
    running: dict[int, tuple[Begin, Place, float]] = {}
    free, work = list(begin), iter(there)
    while True:
        while free and time.monotonic() < until and (place := next(work, None)) is not None:
            tests = reach.within_seconds(reach.tests(module, source, place.line), TESTS_S)
            if not tests:
                yield place, False
                continue
            how = free.pop()
            pid = how(module, place, tests)
            running[pid] = how, place, time.monotonic() + 10 + 4 * reach.seconds(tests)
        if not running:
            return
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            for late, (_, _, deadline) in running.items():
                if time.monotonic() > deadline:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(late, signal.SIGKILL)
            time.sleep(0.01)
            continue
        if pid not in running:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what the tests have left
        how, place, _ = running.pop(pid)
        free.append(how)
        if os.waitstatus_to_exitcode(status) != NO_MUTANT:
            yield place, status != 0


def trial_in_place(slots: list[Slot], module: str, there: list[Place],
                   reach: Reach, until: float) -> Iterator[tuple[Place, bool]]:  # fmt: skip
    """Do what `trial` does, for changes within functions, in a process that has imported all."""
    receiving, sending = os.pipe()
    if not (pid := os.fork()):
        with os.fdopen(sending, "w", buffering=1) as results:
            try:
                slots[0].imported(reach.files(module))
                begin: list[Begin] = [slots[0].begin_in_place for _ in slots]
                for place, killed in trial(begin, module, there, reach, until):
                    results.write(f"{there.index(place)} {int(killed)}\n")
            finally:
                results.flush()
                os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as results:
        for line in results:
            index, killed = map(int, line.split())
            yield there[index], bool(killed)
    os.waitpid(pid, 0)


def explanations() -> dict[str, dict[str, str]]:
    """Return, by module and mutant (`before → after`), why a survivor makes no difference."""
    path = HERE / "survivors.toml"
    return tomllib.loads(path.read_text()) if path.exists() else {}


def test_room(slots: list[Slot], room: Room, minutes: float) -> Iterator[tuple[str, Score]]:
    """Yield the score of each module of a room."""
    began = time.monotonic()
    reach = slots[0].record(room)
    print(f"{room.name}: its tests take {time.monotonic() - began:.0f} s", flush=True)
    explained = explanations()
    for module in room.modules:
        source = (ROOT / module).read_text()
        there = places(source, module)
        score = Score(len(there))
        quick = [
            place
            for place in there
            if in_place.fits(source) and reach.in_function(source, place.line)
        ]
        slow = [place for place in there if place not in quick]
        known = explained.get(module, {})
        began = time.monotonic()
        until = began + 60 * minutes * len(quick) / max(1, len(there))
        trials = chain(
            trial_in_place(slots, module, quick, reach, until),
            trial([slot.begin for slot in slots], module, slow, reach, began + 60 * minutes),
        )
        for place, killed in trials:
            if killed:
                score.killed += 1
            elif (one := mutant(source, place)) is None:
                pass
            elif f"{one.before} → {one.after}" in known:
                score.explained += 1
            else:
                score.survivors.append(one)
                print(f"  survived: {module}:{one}", flush=True)
        for slot in slots:
            (slot.folder / module).write_text(source)  # also after a child that was killed
        print(
            f"{module}: {score.killed} of {score.tried - score.explained} killed, "
            f"{score.share:.0%}; {score.explained} explained; {score.total} in all",
            flush=True,
        )
        yield module, score


def rooms() -> list[Room]:
    return [Room(**room) for room in tomllib.loads((HERE / "modules.toml").read_text())["room"]]


def main() -> int:
    """Test the mutants, print the scores; 1 if fewer than the goal are killed."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("only", nargs="*", help="names of rooms, or paths of modules")
    options.add_argument("--minutes", type=float, default=5.0, help="per module")
    options.add_argument("--workers", type=int, default=2 * (os.cpu_count() or 1))
    options.add_argument("--save", action="store_true", help="keep the scores in score.json")
    given = options.parse_args()
    for name in LIBRARIES:
        importlib.import_module(name)
    scores: dict[str, Score] = {}
    with tempfile.TemporaryDirectory() as folder:
        slots = [Slot(Path(folder) / str(index)) for index in range(given.workers)]
        for room in rooms():
            if given.only and room.name not in given.only:
                room.modules = [module for module in room.modules if module in given.only]
            if room.modules:
                for module, score in test_room(slots, room, given.minutes):
                    scores[module] = score
                    if given.save:
                        save({module: score})
    killed = sum(score.killed for score in scores.values())
    killable = sum(score.tried - score.explained for score in scores.values())
    print(f"{killed} of {killable} mutants killed: {killed / max(1, killable):.1%}")
    return int(killed < GOAL * killable)


def save(scores: dict[str, Score]) -> None:
    """Add the scores to the file."""
    path = HERE / "score.json"
    kept: dict[str, Any] = json.loads(path.read_text())["modules"] if path.exists() else {}
    for module, score in scores.items():
        kept[module] = {
            "mutants": score.total, "tried": score.tried, "killed": score.killed,
            "explained": score.explained, "share": round(score.share, 3),
            "survivors": [str(mutant) for mutant in score.survivors],
        }  # fmt: skip
    totals: Counter[str] = Counter()
    for row in kept.values():
        totals.update({name: row[name] for name in ("mutants", "tried", "killed", "explained")})
    share = round(totals["killed"] / max(1, totals["tried"] - totals["explained"]), 3)
    document = {"share": share, **totals, "modules": dict(sorted(kept.items()))}
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())

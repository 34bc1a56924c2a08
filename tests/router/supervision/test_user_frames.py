"""Which code is the user's: in stacks, and in logs."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from router.supervision import user_frames

CODE = """
import logging, sys
log = logging.getLogger("anything")

def frame():
    log.info("here")
    return sys._getframe()
"""


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages, of which `has_strategies` has an entry point."""
    for name in ("has_strategies", "plain_library"):
        (tmp_path / f"{name}.py").write_text(CODE)
    info = tmp_path / "has_strategies-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: has-strategies\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[microserve.strategies]\nmine = has_strategies.inner:mine\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(user_frames, "_LIBRARIES", (*user_frames._LIBRARIES, str(tmp_path)))
    user_frames.user_packages.cache_clear()
    yield tmp_path
    user_frames.user_packages.cache_clear()
    for name in ("has_strategies", "plain_library"):
        sys.modules.pop(name, None)


def frame_in(module: str) -> FrameType:
    frame: FrameType = importlib.import_module(module).frame()
    return frame


@pytest.mark.usefixtures("libraries")
def test_an_installed_package_with_strategies_is_the_users():
    assert user_frames.is_user(frame_in("has_strategies"))
    assert user_frames.asked_by_user(frame_in("has_strategies"))
    assert not user_frames.is_user(frame_in("plain_library"))
    assert user_frames.at(frame_in("has_strategies")).startswith("has_strategies.py:")


@pytest.mark.usefixtures("libraries")
def test_records_of_the_users_code_are_found(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        frame_in("has_strategies")
        frame_in("plain_library")
        logging.getLogger("router.engines.registry").info("from this file")
    theirs, librarys, ours = caplog.records
    assert user_frames.is_user_record(theirs)
    assert not user_frames.is_user_record(librarys)
    assert user_frames.is_user_record(ours)  # the file counts, not the logger
    ours.pathname = user_frames.__file__
    assert not user_frames.is_user_record(ours)


def frames(*modules: str) -> Any:
    """Return the innermost frame of a stack of functions in `modules`, outermost first."""
    stdlib = json.__file__
    frame = None
    for module in modules:
        file = stdlib if module == "json" else f"/somewhere/{module}.py"
        frame = SimpleNamespace(
            f_globals={"__name__": module}, f_code=SimpleNamespace(co_filename=file), f_back=frame
        )
    return frame


@pytest.mark.parametrize(
    ("modules", "asked"),
    [
        (("router.execution", "mine"), True),
        (("router.execution", "mine", "json", "json"), True),
        (("mine", "router.strategy", "json"), False),  # ours calls the library
        (("mine", "engine"), False),
        (("json",), False),
        ((), False),
        (("routers",), True),  # no package of ours
    ],
)
def test_who_has_called_a_library(modules: tuple[str, ...], asked: bool):
    assert user_frames.asked_by_user(frames(*modules)) is asked


def outer() -> None:
    inner()


def inner() -> None:
    json.loads("no JSON")


def line_of(function: Any, offset: int = 1) -> str:
    return f"{Path(__file__).name}:{function.__code__.co_firstlineno + offset}"


def test_the_users_innermost_line_of_an_error_is_found():
    with pytest.raises(ValueError, match="Expecting value") as caught:
        outer()
    assert user_frames.line_in(caught.value.__traceback__) == line_of(inner)
    assert user_frames.line_in(None) == ""
    last = caught.value.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    assert user_frames.line_in(last) == ""  # in the library only


async def waits() -> None:
    await asyncio.sleep(0)


async def passes_on() -> None:
    await waits()


async def yields() -> AsyncIterator[None]:
    await passes_on()
    yield


def test_the_users_innermost_line_that_waits_is_found():
    coroutine = passes_on()
    assert user_frames.waits_at(coroutine) == line_of(passes_on, 0)  # it has not begun
    coroutine.send(None)
    assert user_frames.waits_at(coroutine) == line_of(waits)
    coroutine.close()
    assert user_frames.waits_at(coroutine) == ""
    generator = yields()
    step = anext(generator)
    step.send(None)
    assert user_frames.waits_at(generator) == line_of(waits)
    step.close()

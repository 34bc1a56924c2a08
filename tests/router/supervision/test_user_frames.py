"""Which code is the user's: in stacks, and in logs."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

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

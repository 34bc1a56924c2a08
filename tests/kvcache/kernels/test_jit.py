"""Numba's disk cache never holds kernels older than the sources compiled into them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvcache.kernels import jit

pytestmark = pytest.mark.usefixtures("common")


@pytest.fixture
def common(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source that is compiled into all kernels, changed at time 1000."""
    file = tmp_path / "common.py"
    file.touch()
    os.utime(file, (1000, 1000))
    monkeypatch.setattr(jit, "COMMON_SOURCES", [file])
    return file


@pytest.mark.parametrize(("age", "kept"), [(999, False), (1001, True)])
def test_kernels_older_than_their_sources_are_dropped(tmp_path: Path, age: int, kept: bool):
    folder = tmp_path / "__pycache__"
    folder.mkdir()
    for name in ("kernels.f-1.py311.nbi", "kernels.f-1.py311.1.nbc", "others.f-1.py311.nbi"):
        (folder / name).touch()
        os.utime(folder / name, (age, age))
    jit.drop_stale_cache(str(tmp_path / "kernels.py"))
    left = {path.name for path in folder.iterdir()}
    # Without the index numba ignores the code files; other modules' indices stay.
    assert left - {"kernels.f-1.py311.nbi"} == {"kernels.f-1.py311.1.nbc", "others.f-1.py311.nbi"}
    assert ("kernels.f-1.py311.nbi" in left) is kept


def test_a_module_without_kernels_is_left_alone(tmp_path: Path):
    jit.drop_stale_cache(str(tmp_path / "kernels.py"))

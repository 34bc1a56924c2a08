"""The folder of a router's actor, which may have files of keys."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from router.ray_fleet.actors import _new_folder


def test_a_restarted_actor_removes_the_folder_that_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, other = _new_folder("a1"), _new_folder("a12")
    (left / "tls_key-key.pem").write_text("secret")
    new = _new_folder("a1")
    assert set(tmp_path.iterdir()) == {new, other}
    assert new.stat().st_mode & 0o777 == 0o700
    assert list(new.iterdir()) == []

"""Every recipe in docs/tour.md, followed literally in a copy of the tree."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipes import RECIPES, follow_all, run


def test_all_recipes_are_found():
    kinds = ["A strategy", "A model family", "A transport", "An attention backend", "A page store"]
    assert list(RECIPES) == kinds


@pytest.mark.slow
@pytest.mark.processes
def test_the_recipes_work(tmp_path: Path):
    """All recipes share one tree and one run: importing torch takes longer than the tests."""
    commands = follow_all(tmp_path)
    chosen = [select[-1] if select else Path(file).stem for file, *select in commands]
    run(tmp_path, "pytest", "-q", *(file for file, *_ in commands), "-k", " or ".join(chosen))

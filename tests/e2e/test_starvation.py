"""One round of `make starve`, with one busy process."""

from __future__ import annotations

from pathlib import Path

import pytest
from starve import run


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_a_starved_host_fails_kills_and_leaks_nothing(tmp_path: Path) -> None:
    found = run(tmp_path, rounds=1, processes=1)
    assert not found["failures"], found

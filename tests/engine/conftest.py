from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_process import EngineProcess


@pytest.fixture(scope="session")
def engine_process() -> Iterator[EngineProcess]:
    """One engine process, shared by the tests that leave it unchanged."""
    process = EngineProcess("--pool-pages", "200", "--max-batch", "4", "--max-waiting", "2")
    yield process
    process.kill()

"""A context beyond its engine's pool, on blocks of an engine at another address, over NIXL."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
from debtor_processes import lent, name_creditors, prompt, tokens, wait_until
from engine_process import EngineProcess

PACKAGES = ("nixl_cu12", "nixl_cu13")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(
        not any(importlib.util.find_spec(package) for package in PACKAGES),
        reason="NIXL is not installed: pip install -e '.[nixl]'",
    ),
]

POOL = 32  # pages of the debtor: 512 tokens
LENGTH, COUNT = 768, 40


@pytest.fixture
def pair() -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """A debtor and a creditor, which know each other by their addresses only."""
    started: list[EngineProcess] = []
    nixl = "--transport", "nixl", "--lease-ms", "2000"
    borrows = "--pool-pages", str(POOL), "--borrow", "--max-model-len", "2048"
    lends = "--pool-pages", "400", "--lend-share", "0.9", "--engine-id", "creditor"
    try:
        started.append(EngineProcess(*nixl, *borrows, "--host", "127.0.0.1"))
        started.append(EngineProcess(*nixl, *lends, "--host", "127.0.0.2"))
        yield started[0], started[1]
    finally:
        for engine in started:
            engine.kill()


def test_a_context_of_one_and_a_half_pools(pair: tuple[EngineProcess, EngineProcess]):
    """Blocks leave by NIXL, and queries travel over TCP."""
    debtor, creditor = pair
    name_creditors(debtor, creditor, available=300)
    found: list[dict[str, Any]] = []
    most = 0
    for event in debtor.stream(prompt(LENGTH), max_tokens=COUNT):
        found.append(event)
        most = max(most, lent(creditor))
    assert most * 16 >= LENGTH - POOL * 16
    whole = creditor.generate(prompt(LENGTH), max_tokens=COUNT)
    assert tokens(found) == tokens(whole)
    assert len(tokens(found)) == COUNT
    debtor.at_rest()
    wait_until(lambda: lent(creditor) == 0)
    creditor.at_rest()
    for engine in pair:
        code, log = engine.stop()
        assert code == 0, log
        assert "Traceback" not in log

"""Deployments that several test modules share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e_deployment import Deployment
from e2e_faults import Alone, engines
from e2e_forked import forked


@pytest.fixture(scope="session")
def tiny() -> Iterator[Deployment]:
    """Three `tiny` engines behind a router; the third serves as the single-engine oracle."""
    with forked("tiny", "--pool-pages", "4096", roles=["any"] * 3) as deployment:
        yield deployment


@pytest.fixture(scope="session")
def alone() -> Iterator[Alone]:
    """Return the answers of an undisturbed engine."""
    with engines(1, "--pool-pages", "1000", "--token-budget", "512") as (engine,):
        yield Alone(engine)
        engine.at_rest()

"""Deployments that several test modules share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e_deployment import Deployment, deployed
from e2e_faults import Alone, engines


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Three `tiny` engines behind a router; the third serves as the single-engine oracle."""
    flags = ("--engines", "3", "--threads", "1", "--pool-pages", "4096")
    with deployed(tmp_path_factory.mktemp("tiny"), "tiny", *flags) as deployment:
        yield deployment


@pytest.fixture(scope="session")
def alone() -> Iterator[Alone]:
    """Return the answers of an undisturbed engine."""
    with engines(1, "--pool-pages", "1000", "--token-budget", "512") as (engine,):
        yield Alone(engine)
        engine.at_rest()

"""Deployments that several test modules share."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest
from e2e_deployment import Deployment, launch
from e2e_faults import Alone, engines

Deploy = Callable[..., Deployment]


@pytest.fixture(scope="session")
def deploy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deploy]:
    """Return a function that starts `microserve up MODEL FLAGS…`.

    At the end every engine must be at rest, and all processes are stopped.
    """
    running: list[Deployment] = []

    def start(model: str, *flags: str) -> Deployment:
        folder = tmp_path_factory.mktemp(model)
        deployment = launch(folder, model, *flags)
        running.append(deployment)
        return deployment

    yield start
    for deployment in running:
        try:
            for engine in deployment.engines:
                engine.check_at_rest()
        finally:
            deployment.up.send_signal(signal.SIGTERM)
            deployment.up.wait(30)


@pytest.fixture(scope="session")
def tiny(deploy: Deploy) -> Deployment:
    """Three `tiny` engines behind a router; the third serves as the single-engine oracle."""
    return deploy("tiny", "--engines", "3", "--threads", "1")


@pytest.fixture(scope="session")
def alone() -> Iterator[Alone]:
    """Return the answers of an undisturbed engine."""
    with engines(1, "--pool-pages", "1000", "--token-budget", "512") as (engine,):
        yield Alone(engine)
        engine.at_rest()

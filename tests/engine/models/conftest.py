from __future__ import annotations

from collections.abc import Callable

import pytest
from model_helpers import DenseCache, PagedCache, StepCache, load

from engine.models import LoadedModel, ModelConfig


@pytest.fixture(params=[DenseCache, PagedCache], ids=["dense", "paged"])
def make_cache(request: pytest.FixtureRequest) -> Callable[[ModelConfig], StepCache]:
    """Makes a new cache for one sequence of a model: the reference, and the engine's own."""
    factory: Callable[[ModelConfig], StepCache] = request.param
    return factory


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The real model, fetched into the user's cache if it is not there yet."""
    return load("smollm2")

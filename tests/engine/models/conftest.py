from __future__ import annotations

from collections.abc import Callable

import pytest
from model_helpers import DenseCache, PagedCache, StepCache, load

from engine.models import LoadedModel, ModelConfig


@pytest.fixture(params=[DenseCache, PagedCache], ids=["dense", "paged"])
def make_cache(request: pytest.FixtureRequest) -> Callable[[ModelConfig], StepCache]:
    """Return a function that makes a cache for one sequence: the reference's or the engine's."""
    factory: Callable[[ModelConfig], StepCache] = request.param
    return factory


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The real model, downloaded into the user's cache folder if necessary."""
    return load("smollm2")

from __future__ import annotations

from collections.abc import Callable

import pytest
from model_helpers import DenseCache, StepCache, load

from engine.models import LoadedModel, ModelConfig


@pytest.fixture
def make_cache() -> Callable[[ModelConfig], StepCache]:
    """A new cache for one sequence of a model."""
    return DenseCache


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The real model, fetched into the user's cache if it is not there yet."""
    return load("smollm2")

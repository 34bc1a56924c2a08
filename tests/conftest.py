"""Set-up of all tests.

Hypothesis draws the same examples in every run, so that a passing suite keeps passing. With
`--hypothesis-profile=fuzz` (`make fuzz`) it draws thousands of others.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A shell ignores SIGINT in background jobs, and child processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several test processes with a thread per core each would wait for each other's threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("deterministic", derandomize=True, deadline=None)
settings.register_profile("fuzz", max_examples=5000, deadline=None, print_blob=True)
settings.load_profile("deterministic")


HERE = Path(__file__).parent
DEPLOYMENTS = (HERE / "conformance", HERE / "e2e")  # all of their tests start processes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in DEPLOYMENTS):
            item.add_marker(pytest.mark.processes)


@pytest.fixture(scope="session")
def smollm2_hf() -> Any:
    """Return transformers' model with SmolLM2's weights in float32. Loading takes long."""
    import torch
    from transformers import AutoModelForCausalLM

    from engine.models.loading.locate import locate

    path = locate("smollm2").path
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return model.eval()

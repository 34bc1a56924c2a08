"""For all tests: hypothesis draws the same examples each time, so that a green run stays green.

With `--hypothesis-profile=fuzz` (`make fuzz`) it draws thousands of others."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import settings

# A shell that starts this in the background has it ignored, here and in all that is started here.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("deterministic", derandomize=True, deadline=None)
settings.register_profile("fuzz", max_examples=5000, deadline=None, print_blob=True)
settings.load_profile("deterministic")


@pytest.fixture(scope="session")
def smollm2_hf() -> Any:
    """transformers' model with the weights of the real one, in float32; it takes long to read."""
    import torch
    from transformers import AutoModelForCausalLM

    from engine.models.loading.locate import locate

    path = locate("smollm2").path
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return model.eval()

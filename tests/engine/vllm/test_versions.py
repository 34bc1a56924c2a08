"""Which vLLM is accepted."""

from __future__ import annotations

import importlib.util

import pytest

from engine.protocol import BadRequest
from engine.vllm.versions import check_version, check_vllm


@pytest.mark.parametrize("version", ["0.32.0", "0.32.7", "0.32.1+cpu"])
def test_a_version_within_the_range_is_accepted(version: str):
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0", "dev", ""])
def test_another_version_is_refused_with_the_range(version: str):
    with pytest.raises(BadRequest, match=r"from 0\.32 to below 0\.33; here is"):
        check_version(version)


def installed() -> bool:
    found = importlib.util.find_spec("vllm")  # this folder, if vLLM is not
    return found is not None and found.origin is not None


@pytest.mark.skipif(installed(), reason="vLLM is installed")
def test_without_vllm_the_backend_is_refused():
    with pytest.raises(BadRequest, match="not installed"):
        check_vllm()

"""Flags that mean nothing to vLLM are refused before it starts."""

from __future__ import annotations

import pytest

from engine.protocol import BadRequest, EngineConfig
from engine.vllm.flags import check_own


@pytest.mark.parametrize("flag", [{"host_pages": 5}, {"lend_share": 0.5}, {"borrow": True}])
def test_flags_of_this_project_s_own_engine_are_refused(flag: dict[str, float]):
    (name,) = flag
    said = f"--{name.replace('_', '-')} has no meaning with --backend vllm"
    with pytest.raises(BadRequest, match=said):
        check_own(EngineConfig(backend="vllm", **flag))  # type: ignore[arg-type]
    check_own(EngineConfig(backend="vllm"))

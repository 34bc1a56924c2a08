from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import build
from engine.build import _dtype, build_engine
from engine.kernels.cpu_features import multiplies_bf16
from engine.protocol import BadRequest
from engine.protocol.config import EngineConfig

X86 = "processor : 0\nmodel name : bf16\nflags\t\t: fpu avx512f avx512_bf16 avx512_vnni\n"
ARM = "processor : 0\nFeatures\t: fp asimd bf16 sve\nCPU part : 0xd40\n"
OLD = "processor : 0\nmodel name : avx512_bf16\nflags\t\t: fpu avx512f not_avx512_bf16\n"


@pytest.mark.parametrize(("text", "there"), [(X86, True), (ARM, True), (OLD, False), ("", False)])
def test_cpuinfo_says_whether_the_processor_multiplies_bf16(text: str, there: bool, tmp_path: Path):
    (tmp_path / "cpuinfo").write_text(text)
    assert multiplies_bf16(tmp_path / "cpuinfo") is there


def test_without_cpuinfo_bf16_is_not_used(tmp_path: Path):
    assert multiplies_bf16(tmp_path / "cpuinfo") is False


@pytest.mark.parametrize(
    ("config", "there", "dtype"),
    [
        (EngineConfig("smollm2"), True, torch.bfloat16),
        (EngineConfig("smollm2"), False, torch.float32),
        (EngineConfig("smollm2", device="cuda"), False, torch.bfloat16),
        (EngineConfig("tiny"), True, torch.float32),
        (EngineConfig("mock"), True, torch.float32),
        (EngineConfig("tiny", dtype="bfloat16"), False, torch.bfloat16),
        (EngineConfig("smollm2", dtype="float32"), True, torch.float32),
    ],
)
def test_the_default_dtype_of_weights(
    config: EngineConfig, there: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(build, "multiplies_bf16", lambda: there)
    assert _dtype(config) == dtype


@pytest.mark.parametrize(
    ("there", "said"), [(False, "finds no GPU"), (True, "no transport supports")]
)
def test_an_engine_on_a_gpu_is_refused(there: bool, said: str, monkeypatch: pytest.MonkeyPatch):
    """See `docs/gpu.md`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    with pytest.raises(BadRequest, match=said):
        build_engine(EngineConfig("tiny", device="cuda"), b"secret", 1)

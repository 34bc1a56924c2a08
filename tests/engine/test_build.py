from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine import build
from engine.build import _dtype, build_engine
from engine.kernels.cpu_features import mkl_mode, multiplies_bf16
from engine.protocol import BadRequest
from engine.protocol.config import EngineConfig
from engine.sizing import Memory
from kvcache.remote_attention import Limits

X86 = "processor : 0\nmodel name : bf16\nflags\t\t: fpu avx512f avx512_bf16 avx512_vnni\n"
ARM = "processor : 0\nFeatures\t: fp asimd bf16 sve\nCPU part : 0xd40\n"
OLD = "processor : 0\nmodel name : avx512_bf16\nflags\t\t: fpu avx512f not_avx512_bf16\n"


@pytest.mark.parametrize(("text", "there"), [(X86, True), (ARM, True), (OLD, False), ("", False)])
def test_cpuinfo_says_whether_the_processor_multiplies_bf16(text: str, there: bool, tmp_path: Path):
    (tmp_path / "cpuinfo").write_text(text)
    assert multiplies_bf16(tmp_path / "cpuinfo") is there


@pytest.mark.parametrize(
    ("text", "mode"),
    [(X86, "AVX512,STRICT"), ("flags : fpu avx2 fma\n", "AVX2,STRICT"), (ARM, ""), ("", "")],
)
def test_cpuinfo_says_in_which_mode_mkl_is_reproducible(text: str, mode: str, tmp_path: Path):
    (tmp_path / "cpuinfo").write_text(text)
    assert mkl_mode(tmp_path / "cpuinfo") == mode


def test_without_cpuinfo_no_feature_is_used(tmp_path: Path):
    assert multiplies_bf16(tmp_path / "cpuinfo") is False
    assert not mkl_mode(tmp_path / "cpuinfo")


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


def test_without_a_gpu_an_engine_on_one_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadRequest, match="finds no GPU"):
        build_engine(EngineConfig("tiny", device="cuda"), b"secret", 1)


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig("mock", device="cuda"),
        EngineConfig("tiny", device="cuda", tp=2),
        EngineConfig("tiny", device="cuda", pp=2),
        EngineConfig("tiny", device="cuda", device_pages=64),
        EngineConfig("tiny", device="cuda", lend_share=0.5),
        EngineConfig("tiny", device="cuda", borrow=True),
    ],
)
def test_what_needs_pools_in_host_memory_is_refused_on_a_gpu(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(BadRequest, match="needs --device cpu"):
        build_engine(config, b"secret", 1)


TEAMS = """
import asyncio, os, threading, time, torch
from engine.build import build_engine
from engine.protocol import EngineConfig
from kvcache.memory import KVLayout, LocalRegion

def native():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

async def main():
    torch.set_num_threads(2)  # torch starts threads for another library then, which only sleep
    before = native()
    engine = build_engine(EngineConfig("tiny", threads=2, pool_pages=64), b"secret", 1)
    LocalRegion(KVLayout(4, 4096, 16, 2, 32, torch.float32))
    for _ in range(2000):  # the team of a thread that has ended ends a little later
        if native() == before:
            break
        time.sleep(0.01)
    print(native() - before)
    os._exit(0)

asyncio.run(main())
"""


@pytest.mark.processes
@pytest.mark.slow
def test_building_an_engine_leaves_no_second_team_of_threads():
    """It would compete with the team of the step loop, for as long as the process lives."""
    done = subprocess.run(
        [sys.executable, "-c", TEAMS],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["0"]


async def test_the_context_is_bounded_by_the_flag_and_by_the_pool():
    for flags, context in (({}, 8192), ({"max_model_len": 100}, 100), ({"pool_pages": 4}, 64)):
        config = EngineConfig("tiny", **{"pool_pages": 1024, **flags})
        engine = build_engine(config, b"secret", 1)
        try:
            assert engine.context_length == context
        finally:
            await engine.mirrors.close()
            engine.cache.close()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"max_model_len": 8193}, "the context of tiny is 8192 tokens"),
        ({"pool_pages": 1 << 34}, "--pool-pages 17179869184 needs"),
        ({"host_pages": 1 << 34}, "--host-pages 17179869184 needs"),
        ({"device_pages": 8, "max_model_len": 65}, "half of --device-pages 8 has room for 64"),
        ({"device_pages": 21, "pool_pages": 20}, "--device-pages 21: the pool has 20 pages"),
    ],
)
async def test_a_context_or_pool_that_cannot_be_is_refused(flags: dict[str, int], said: str):
    with pytest.raises(BadRequest, match=said):
        build_engine(EngineConfig("tiny", **flags), b"secret", 1)


async def test_a_context_beyond_what_other_engines_compute_is_refused(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(build, "Limits", lambda: Limits(context=1000))
    flags = {"borrow": True, "pool_pages": 40, "max_model_len": 1001}
    with pytest.raises(BadRequest, match="with --borrow it is 1000 tokens at most"):
        build_engine(EngineConfig("tiny", **flags), b"secret", 1)


async def test_the_pool_fits_the_container_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    memory = Memory(1 << 30, 8 << 20, "the control group /a")
    monkeypatch.setattr(build, "read_memory", lambda: memory)
    engine = build_engine(EngineConfig("tiny", memory_share=0.5), b"secret", 1)
    try:
        assert engine.cache.layout.nbytes <= 3 << 20
        (record,) = [record for record in caplog.records if record.name == "engine.build"]
        assert record.levelname == "WARNING"
        text = record.getMessage()
        assert "25.0% of the available 8 MiB" in text and "the control group /a" in text
        assert f"contexts are limited to {engine.context_length} of 8192 tokens" in text
    finally:
        await engine.mirrors.close()
        engine.cache.close()

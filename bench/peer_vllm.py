"""vLLM on the same cores: its environment, model folder and server."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from engine.models.loading.gguf_checkpoint import open_gguf
from engine.models.loading.locate import locate
from engine.models.model_folder import write_folder

__all__ = ["PYTHON", "environment", "model_folder", "serve"]

PYTHON = Path(__file__).parent.parent / ".peers" / "vllm" / "bin" / "python"
KV_GIB = "2"


def model_folder(model: str) -> Path:
    """Return a GGUF model, dequantised to bfloat16, as a Hugging Face folder of a Llama.

    It stays in the peer's environment: vLLM compiles a model again for each path.
    """
    source = locate(model)
    folder = PYTHON.parent.parent / "models" / (source.sha256 or model)
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=PYTHON.parent.parent) as name:
            written = Path(name) / "model"
            written.mkdir()
            write_folder(open_gguf(source.path, source.sha256), written, torch.bfloat16)
            folder.parent.mkdir(exist_ok=True)
            written.rename(folder)
    return folder


def serve(folder: Path, port: int, context: int, dtype: str = "bfloat16") -> list[str]:
    """Return the command of its OpenAI-style server: all cores, compiled, by default."""
    return [
        *(str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--served-model-name", "peer", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", dtype, "--max-model-len", str(context), "--max-num-seqs", "64"),
    ]


def environment() -> dict[str, str]:
    """Return its processes' environment: no hub, and as much room for KV as ours."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": KV_GIB,
        "VLLM_NO_USAGE_STATS": "1",
    }

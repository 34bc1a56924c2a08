"""vLLM on the same cores: its environment, model folder and server."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from engine.models.loading.gguf_checkpoint import open_gguf
from engine.models.loading.locate import locate
from engine.models.model_folder import write_folder

__all__ = ["PYTHON", "environment", "save_folder", "serve"]

PYTHON = Path(__file__).parent.parent / ".peers" / "vllm" / "bin" / "python"
KV_GIB = "2"


def save_folder(model: str, folder: Path) -> None:
    """Write a GGUF model, dequantised to bfloat16, as a Hugging Face folder of a Llama."""
    source = locate(model)
    checkpoint = open_gguf(source.path, source.sha256)
    folder.mkdir()
    write_folder(checkpoint, folder, torch.bfloat16)


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

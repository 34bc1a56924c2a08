"""vLLM on the same cores: its environment, model folder and server."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.models.loading.gguf_checkpoint import open_gguf
from engine.models.loading.locate import locate

__all__ = ["PYTHON", "environment", "save_folder", "serve"]

PYTHON = Path(__file__).parent.parent / ".peers" / "vllm" / "bin" / "python"
KV_GIB = "2"


def save_folder(model: str, folder: Path) -> None:
    """Write a GGUF model, dequantised to bfloat16, as a Hugging Face folder of a Llama."""
    source = locate(model)
    checkpoint = open_gguf(source.path, source.sha256)
    config, text = checkpoint.config, checkpoint.tokenization
    folder.mkdir()
    tensors = {name: checkpoint.read(name).to(torch.bfloat16) for name in checkpoint.shapes}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(text.eos_token_ids),
    }
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "tokenizer.json").write_text(text.tokenizer_json)
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": text.eos_token}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))


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

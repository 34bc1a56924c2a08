"""A model as a Hugging Face folder, for engines that read nothing else, with its tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.models.config import ModelConfig
from engine.models.errors import ModelError, UnknownModel, UnsupportedArchitecture
from engine.models.loading.checkpoint import Checkpoint, digest_files
from engine.models.loading.fields import read_json
from engine.models.loading.gguf_checkpoint import open_gguf
from engine.models.loading.hf_folder import read_folder_tokenization
from engine.models.loading.locate import locate
from engine.models.loading.smollm2 import cache_folder
from engine.models.loading.tiny import open_tiny
from engine.models.loading.tokenization import Tokenization

__all__ = ["ModelFolder", "find_folder", "write_folder"]


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A Hugging Face folder; `weights` is a digest of what determines keys and values."""

    path: Path
    tokenization: Tokenization
    weights: str


def find_folder(name: str) -> ModelFolder:
    """Return the folder of a model; download it or write it from another format if necessary.

    `.gguf` files, `smollm2` and `tiny` are written as float32 into the cache folder once. Takes
    about a second per GB of weights, to digest them. Raises `ModelError`.
    """
    source = locate(name)
    match source.kind:
        case "folder":
            return _opened(source.path)
        case "gguf":
            return _written(open_gguf(source.path, source.sha256))
        case "tiny":
            return _written(open_tiny())
    raise UnknownModel(f"the model {name!r} has no weights")


def write_folder(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write config, weights in `dtype` and tokenizer into a folder, which exists.

    Raises `UnsupportedArchitecture` for others than plain Llamas: what comes from .gguf files.
    """
    config, text = checkpoint.config, checkpoint.tokenization
    described = _config(config, text, dtype)
    tensors = {name: checkpoint.read(name).to(dtype).contiguous() for name in checkpoint.shapes}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "tokenizer.json").write_text(text.tokenizer_json)
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": text.bos_token,
        "eos_token": text.eos_token,
        "chat_template": text.chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))


def _opened(folder: Path) -> ModelFolder:
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        raise ModelError(f"the model folder {folder} has no weights")
    config = folder / "config.json"
    text = read_folder_tokenization(folder, read_json(config))
    weights = hashlib.sha256(config.read_bytes() + digest_files(files).encode()).hexdigest()
    return ModelFolder(folder, text, weights)


def _written(checkpoint: Checkpoint) -> ModelFolder:
    """Write a checkpoint as a folder, if it is not there yet."""
    config = checkpoint.config
    key = hashlib.sha256(f"{checkpoint.digest}|{config}".encode()).hexdigest()[:16]
    folder = cache_folder() / "folders" / key
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when it is complete: engines that start together may write it at the same time.
        part = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=folder.parent))
        try:
            write_folder(checkpoint, part)
            part.chmod(0o777 & ~_umask())
            try:
                part.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    weights = f"{checkpoint.digest}|{config}"
    return ModelFolder(folder, checkpoint.tokenization, weights)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _config(config: ModelConfig, text: Tokenization, dtype: torch.dtype) -> dict[str, object]:
    if config.architecture != "llama" or config.qk_norm or config.attention_bias:
        raise UnsupportedArchitecture(
            f"a {config.architecture} model cannot be written as a Hugging Face folder here"
        )
    if config.rope.scaling is not None:
        raise UnsupportedArchitecture(
            "a model with scaled RoPE cannot be written as a Hugging Face folder here"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": str(dtype).removeprefix("torch."),
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

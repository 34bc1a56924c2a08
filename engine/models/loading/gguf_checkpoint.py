"""GGUF files as checkpoints: metadata becomes a config, tensors get Hugging Face's names."""

from __future__ import annotations

import math
import re
from pathlib import Path

from torch import Tensor

from engine.models.config import (
    Architecture,
    FrequencyFactors,
    LinearScaling,
    ModelConfig,
    Rope,
    Scaling,
    YarnScaling,
)
from engine.models.errors import CorruptModel, UnsupportedArchitecture
from engine.models.loading.checkpoint import Checkpoint, digest_files
from engine.models.loading.fields import Fields
from engine.models.loading.gguf_file import GGUFFile
from engine.models.loading.gguf_tokenizer import read_tokenization
from engine.models.loading.hf_config import mscale

__all__ = ["open_gguf"]

# llama.cpp writes Mistral models as "llama".
_ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def open_gguf(path: Path, digest: str | None = None) -> Checkpoint:
    """Open a GGUF file. `digest` is its SHA-256, if known already.

    Raises: `MissingFile`, `CorruptModel`, `UnsupportedArchitecture`, `UnsupportedTokenizer`.
    """
    file = GGUFFile(path)
    config = _read_config(file)
    stored_as = {_name(name): name for name in file.shapes if name != _ROPE_FACTORS}

    def read(name: str) -> Tensor:
        tensor = file.read(stored_as[name])
        if config.architecture == "llama" and (match := _QUERY_OR_KEY.search(name)):
            heads = config.num_heads if match[1] == "q" else config.num_kv_heads
            tensor = _unpermute(tensor, heads)
        return tensor

    return Checkpoint(
        config=config,
        tokenization=read_tokenization(file.metadata),
        shapes={name: file.shapes[stored] for name, stored in stored_as.items()},
        read=read,
        digest=digest or digest_files([path]),
    )


def _unpermute(rows: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's permutation of the rows of q and k: [heads·dim, n] or bias [heads·dim].

    llama.cpp stores the two rows of a RoPE pair side by side, Hugging Face half a head apart.
    """
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _name(stored: str) -> str:
    """Return Hugging Face's name of a tensor; unknown names are unchanged."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", stored)
    if match is None or match[2] not in _NAMES:
        return stored
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{_NAMES[match[2]]}.{match[3]}"


def _read_config(file: GGUFFile) -> ModelConfig:
    metadata, shapes = file.metadata, file.shapes
    name = metadata.text("general.architecture")
    if name not in _ARCHITECTURES:
        raise UnsupportedArchitecture(
            f"{file.path}: architecture {name!r} is not supported; "
            f"supported are {', '.join(_ARCHITECTURES)}"
        )
    if metadata.integer(f"{name}.expert_count", 0):
        raise UnsupportedArchitecture(f"{file.path}: a mixture of experts is not supported")
    embedding = shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise CorruptModel(f"{file.path} lacks tensor token_embd.weight")
    hidden = metadata.integer(f"{name}.embedding_length")
    heads = metadata.integer(f"{name}.attention.head_count")
    if not 1 <= heads <= hidden:
        raise CorruptModel(f"{file.path}: {heads} attention heads in {hidden} dimensions")
    head_dim = metadata.integer(f"{name}.attention.key_length", hidden // heads)
    context = metadata.integer(f"{name}.context_length")
    window = metadata.integer(f"{name}.attention.sliding_window", 0) or None
    return ModelConfig(
        architecture=_ARCHITECTURES[name],
        vocab_size=embedding[0],
        hidden_size=hidden,
        intermediate_size=metadata.integer(f"{name}.feed_forward_length"),
        num_layers=metadata.integer(f"{name}.block_count"),
        num_heads=heads,
        num_kv_heads=metadata.integer(f"{name}.attention.head_count_kv", heads),
        head_dim=head_dim,
        context_length=min(context, window or context),
        rms_norm_eps=metadata.number(f"{name}.attention.layer_norm_rms_epsilon"),
        rope=_rope(file, name, head_dim, context),
        tie_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        qk_norm=name == "qwen3",
        sliding_window=window,
    )


def _rope(file: GGUFFile, name: str, head_dim: int, context: int) -> Rope:
    metadata = file.metadata
    rotated = metadata.integer(f"{name}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedArchitecture(
            f"{file.path}: RoPE over {rotated} of a head's {head_dim} dimensions is not supported"
        )
    theta = metadata.number(f"{name}.rope.freq_base", 10_000.0)
    if _ROPE_FACTORS in file.shapes:
        return Rope(theta, _factors(file, head_dim))
    return Rope(theta, _scaling(metadata, f"{name}.rope.scaling", context))


def _factors(file: GGUFFile, head_dim: int) -> FrequencyFactors:
    if file.shapes[_ROPE_FACTORS] != (head_dim // 2,):
        raise CorruptModel(f"{file.path}: {_ROPE_FACTORS} does not have one factor per frequency")
    factors = tuple(file.read(_ROPE_FACTORS).tolist())
    if not all(factor > 0 and math.isfinite(factor) for factor in factors):
        raise CorruptModel(f"{file.path}: {_ROPE_FACTORS} has factors that are not positive")
    return FrequencyFactors(factors)


def _scaling(metadata: Fields, prefix: str, context: int) -> Scaling | None:
    factor = metadata.number(f"{prefix}.factor", 1.0)
    kind = metadata.text(f"{prefix}.type", "none")
    if kind == "none" or factor == 1.0:
        return None
    if not factor > 0:
        raise CorruptModel(f"{metadata.origin}: {prefix}.factor is {factor}; it must be positive")
    if kind == "linear":
        return LinearScaling(factor)
    if kind == "yarn":
        original = metadata.integer(f"{prefix}.original_context_length", context)
        if original < 1:
            raise CorruptModel(f"{metadata.origin}: {prefix}.original_context_length is {original}")
        return YarnScaling(factor, original, attention_factor=mscale(factor))
    raise UnsupportedArchitecture(
        f"{metadata.origin}: RoPE scaling {kind!r} is not supported; supported are linear and yarn"
    )


_ROPE_FACTORS = "rope_freqs.weight"
_QUERY_OR_KEY = re.compile(r"self_attn\.([qk])_proj\.")

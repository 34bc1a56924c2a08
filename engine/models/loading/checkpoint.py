"""`Checkpoint`: a model as stored at its source, and its assembly into a `Transformer`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.decoder import Layer, Transformer
from engine.models.errors import CorruptModel, UnsupportedArchitecture
from engine.models.loading.tokenization import Tokenization

__all__ = ["Checkpoint", "assemble", "digest_files"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The common form of all sources; tensors have Hugging Face's names and layout."""

    config: ModelConfig
    tokenization: Tokenization
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]  # one tensor by name, on CPU, in any floating dtype
    digest: str  # hex; differs for different weights


def assemble(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Transformer:
    """Return a transformer with the checkpoint's weights, in `dtype` on `device`.

    Names and shapes are checked before memory is allocated. Tensors are then read one at a time.

    Raises: `CorruptModel` if a tensor is missing, has another shape, or is not finite;
    `UnsupportedArchitecture` if there are tensors that this architecture does not have.
    """
    config, shapes = checkpoint.config, checkpoint.shapes
    layers = _layer_count(shapes)
    if layers != config.num_layers:  # checked first, because a damaged count may be huge
        raise CorruptModel(f"the weights have {layers} layers, not {config.num_layers}")
    transformer = Transformer(config, dtype)
    _check_shapes(_targets(transformer), shapes)
    transformer.allocate(device)
    for name, target in _targets(transformer).items():
        target.copy_(checkpoint.read(name))
        if not target.sum(dtype=torch.float32).isfinite():
            raise CorruptModel(f"tensor {name} has values that are not finite in {dtype}")
    return transformer


def digest_files(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of the contents of `paths`, in order; takes about a second per GB."""
    digests = []
    for path in paths:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _targets(transformer: Transformer) -> dict[str, Tensor]:
    """Return the target of each tensor, by its Hugging Face name: a weight, or part of one."""
    targets: dict[str, Tensor] = {
        "model.embed_tokens.weight": transformer.embed.weight,
        "model.norm.weight": transformer.norm.weight,
    }
    if transformer.head is not transformer.embed:
        targets["lm_head.weight"] = transformer.head.weight
    for layer in transformer.layers:
        if not isinstance(layer, Layer):
            raise TypeError(f"a layer is a {type(layer)}")
        for name, target in _layer_targets(transformer.config, layer).items():
            targets[f"model.layers.{layer.index}.{name}"] = target
    return targets


def _layer_targets(config: ModelConfig, layer: Layer) -> dict[str, Tensor]:
    targets: dict[str, Tensor] = {
        "input_layernorm.weight": layer.attention_norm.weight,
        "self_attn.o_proj.weight": layer.out.weight,
        "post_attention_layernorm.weight": layer.mlp_norm.weight,
        "mlp.down_proj.weight": layer.down.weight,
    }
    if layer.out.bias is not None:
        targets["self_attn.o_proj.bias"] = layer.out.bias
    heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    rows = [count * config.head_dim for count in heads]
    for kind, fused in layer.qkv.named_parameters():
        for letter, part in zip("qkv", torch.split(fused, rows), strict=True):
            targets[f"self_attn.{letter}_proj.{kind}"] = part
    for half, part in zip(("gate", "up"), layer.gate_up.weight.chunk(2), strict=True):
        targets[f"mlp.{half}_proj.weight"] = part
    if layer.qk_norm is not None:
        for letter, part in zip("qk", torch.split(layer.qk_norm.weight, heads[:2]), strict=True):
            targets[f"self_attn.{letter}_norm.weight"] = part
    return targets


def _check_shapes(targets: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, target in targets.items():
        if name not in shapes:
            raise CorruptModel(f"the weights lack tensor {name}")
        # A head norm's weight [head_dim] is repeated for every head, [heads, head_dim].
        expected = tuple(target.shape[-1:] if name.endswith("_norm.weight") else target.shape)
        if shapes[name] != expected:
            raise CorruptModel(
                f"tensor {name} has shape {list(shapes[name])}, not {list(expected)} as configured"
            )
    extra = sorted(name for name in shapes if name not in targets and not _IGNORED.search(name))
    if extra:
        raise UnsupportedArchitecture(
            f"the weights have {len(extra)} tensors that this architecture lacks, like {extra[0]}"
        )


def _layer_count(names: Iterable[str]) -> int:
    found = (_LAYER.match(name) for name in names)
    return len({match[1] for match in found if match})


_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_IGNORED = re.compile(
    r"rotary_emb\.inv_freq$"  # computed from the configuration; old checkpoints store it
    r"|^lm_head\.weight$"  # a copy of tied embeddings
)

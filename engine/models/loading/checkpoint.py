"""`Checkpoint`: a model as stored at its source, and its assembly into a `Transformer`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.decoder import Layer, Sum, Transformer
from engine.models.errors import CorruptModel, UnsupportedArchitecture
from engine.models.loading.tokenization import Tokenization
from engine.models.part import Part

__all__ = ["Checkpoint", "assemble", "digest_files"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The common form of all sources; tensors have Hugging Face's names and layout."""

    config: ModelConfig
    tokenization: Tokenization
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]  # one tensor by name, on CPU, in any floating dtype
    digest: str  # hex; differs for different weights


class Target(NamedTuple):
    """Where a tensor goes: a weight, or part of one."""

    weight: Tensor
    wanted: range | None = None  # of its rows, or columns; None: all
    dim: int = 0
    size: int = 0  # of that dimension in the tensor

    @property
    def source_shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        shape = list(self.weight.shape)
        if self.wanted is not None:
            shape[self.dim] = self.size
        return tuple(shape)

    def fill(self, tensor: Tensor) -> None:
        if self.wanted is not None:
            tensor = tensor.narrow(self.dim, self.wanted.start, len(self.wanted))
        self.weight.copy_(tensor)


def assemble(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    part: Part | None = None,
    sum_: Sum | None = None,
) -> Transformer:
    """Return a transformer with the checkpoint's weights, in `dtype` on `device`.

    With `part`, it has these weights only, and needs `sum_` as `Transformer` does. Names and shapes
    of the whole model are checked before memory is allocated. Tensors are then read one at a time.

    Raises: `CorruptModel` if a tensor is missing, has another shape, or is not finite;
    `UnsupportedArchitecture` if there are tensors that this architecture does not have.
    """
    config, shapes = checkpoint.config, checkpoint.shapes
    layers = _layer_count(shapes)
    if layers != config.num_layers:  # checked first, because a damaged count may be huge
        raise CorruptModel(f"the weights have {layers} layers, not {config.num_layers}")
    transformer = Transformer(config, dtype)
    _check_shapes(_targets(transformer), shapes)
    if part is not None:
        transformer = Transformer(config, dtype, part, sum_)
    transformer.allocate(device)
    for name, target in _targets(transformer).items():
        target.fill(checkpoint.read(name))
        if not target.weight.sum(dtype=torch.float32).isfinite():
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


def _targets(transformer: Transformer) -> dict[str, Target]:
    """Return the target of each tensor that the transformer needs, by its Hugging Face name."""
    part, rows = transformer.part, transformer.config.vocab_size
    targets: dict[str, Target] = {}
    if transformer.embed is not None:
        targets["model.embed_tokens.weight"] = Target(transformer.embed.weight, part.vocab, 0, rows)
    if transformer.head is not None:
        targets["model.norm.weight"] = Target(transformer.norm.weight)
        if transformer.head is not transformer.embed:
            tied = transformer.config.tie_embeddings
            name = "model.embed_tokens.weight" if tied else "lm_head.weight"
            targets[name] = Target(transformer.head.weight, part.vocab, 0, rows)
    for layer in transformer.layers:
        if not isinstance(layer, Layer):
            raise TypeError(f"a layer is a {type(layer)}")
        for name, target in _layer_targets(transformer.config, part, layer).items():
            targets[f"model.layers.{layer.index}.{name}"] = target
    return targets


def _layer_targets(config: ModelConfig, part: Part, layer: Layer) -> dict[str, Target]:
    dim, inner = config.head_dim, config.intermediate_size
    own = {"q": part.heads, "k": part.kv_heads, "v": part.kv_heads}
    of = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    rows = {letter: range(heads.start * dim, heads.stop * dim) for letter, heads in own.items()}
    targets = {
        "input_layernorm.weight": Target(layer.attention_norm.weight),
        "self_attn.o_proj.weight": Target(layer.out.weight, rows["q"], 1, of["q"] * dim),
        "post_attention_layernorm.weight": Target(layer.mlp_norm.weight),
        "mlp.down_proj.weight": Target(layer.down.weight, part.inner, 1, inner),
    }
    if layer.out.bias is not None:
        targets["self_attn.o_proj.bias"] = Target(layer.out.bias)
    for kind, fused in layer.qkv.named_parameters():
        parts = torch.split(fused, [len(wanted) for wanted in rows.values()])
        for (letter, wanted), weight in zip(rows.items(), parts, strict=True):
            name = f"self_attn.{letter}_proj.{kind}"
            targets[name] = Target(weight, wanted, 0, of[letter] * dim)
    for half, weight in zip(("gate", "up"), layer.gate_up.weight.chunk(2), strict=True):
        targets[f"mlp.{half}_proj.weight"] = Target(weight, part.inner, 0, inner)
    if layer.qk_norm is not None:
        parts = torch.split(layer.qk_norm.weight, [len(own["q"]), len(own["k"])])
        for letter, weight in zip("qk", parts, strict=True):
            targets[f"self_attn.{letter}_norm.weight"] = Target(weight)
    return targets


def _check_shapes(targets: Mapping[str, Target], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, target in targets.items():
        if name not in shapes:
            raise CorruptModel(f"the weights lack tensor {name}")
        # A head norm's weight [head_dim] is repeated for every head, [heads, head_dim].
        shape = target.source_shape
        expected = shape[-1:] if name.endswith("_norm.weight") else shape
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

"""Models with random weights: for the shapes of models that are too large to have at hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from engine.models import LoadedModel, ModelConfig, Transformer
from engine.models.config import Rope
from engine.models.loading.tiny import byte_tokenization, open_tiny
from engine.models.model_folder import write_folder

__all__ = ["llama", "random_folder", "random_model"]


def llama(
    *, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, vocab: int,
    context: int = 16384,
) -> ModelConfig:  # fmt: skip
    """Return the configuration of a Llama of these dimensions."""
    return ModelConfig(
        architecture="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=context,
        rms_norm_eps=1e-5,
        rope=Rope(theta=500_000.0),
        tie_embeddings=False,
        attention_bias=False,
        qk_norm=False,
    )


@torch.inference_mode()
def random_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Return a model whose weights have a standard deviation of 1/√inputs, the same every time."""
    transformer = Transformer(config, dtype)
    transformer.allocate(device)
    generator = torch.Generator(device).manual_seed(0)
    for weight in transformer.parameters():
        if weight.dim() == 1:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
    text = byte_tokenization(config.vocab_size)
    return LoadedModel(
        name="random",
        config=config,
        transformer=transformer,
        tokenizer_json=text.tokenizer_json,
        chat_template=text.chat_template,
        bos_token=text.bos_token,
        eos_token=text.eos_token,
        eos_token_ids=text.eos_token_ids,
        add_bos=text.add_bos,
        weights_digest="random",
        quantization="none",
    )


def random_folder(config: ModelConfig, folder: Path, device: torch.device) -> None:
    """Write a model as `random_model`'s into a folder, which exists, in bfloat16."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config.vocab_size, hidden),
    }
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (q_rows, hidden),
            prefix + "self_attn.k_proj.weight": (kv_rows, hidden),
            prefix + "self_attn.v_proj.weight": (kv_rows, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, q_rows),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    generator = torch.Generator(device).manual_seed(0)

    def read(name: str) -> torch.Tensor:
        shape = shapes[name]
        if len(shape) == 1:
            return torch.ones(shape)
        weight = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return (weight * shape[1] ** -0.5).cpu()

    whole = replace(
        open_tiny(),
        config=config,
        tokenization=byte_tokenization(config.vocab_size),
        shapes=shapes,
        read=read,
        digest="random",
    )
    write_folder(whole, folder, torch.bfloat16)

"""Models with random weights: for the shapes of models that are too large to have at hand."""

from __future__ import annotations

import torch

from engine.models import LoadedModel, ModelConfig, Transformer
from engine.models.config import Rope
from engine.models.loading.tiny import byte_tokenization

__all__ = ["llama", "random_model"]


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

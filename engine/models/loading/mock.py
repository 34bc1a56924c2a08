"""`mock`: the configuration and the text of a model without weights."""

from __future__ import annotations

from torch import Tensor

from engine.models.config import ModelConfig, Rope
from engine.models.errors import CorruptModel
from engine.models.loading.checkpoint import Checkpoint
from engine.models.loading.tiny import byte_tokenization
from engine.models.loading.tokenization import load_tokenizer

__all__ = ["mock_tokens", "open_mock"]

TEXT = "The quick brown fox jumps over the lazy dog. "

# The smallest possible KV cache: 16 bytes per token in float32.
_CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=512,
    hidden_size=2,
    intermediate_size=1,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    context_length=32_768,
    rms_norm_eps=1e-5,
    rope=Rope(theta=10_000.0),
    tie_embeddings=False,
    attention_bias=False,
    qk_norm=False,
)


def open_mock() -> Checkpoint:
    """Return a checkpoint without tensors, with the tokenizer of `tiny`.

    Its digest is constant, so all mock engines can exchange KV.
    """
    return Checkpoint(
        config=_CONFIG,
        tokenization=byte_tokenization(_CONFIG.vocab_size),
        shapes={},
        read=_no_tensor,
        digest="mock",
    )


def _no_tensor(name: str) -> Tensor:
    raise CorruptModel(f"mock has no tensor {name}")


def mock_tokens() -> list[int]:
    """Return the ids of the mock's text; position p gets token `ids[p % len(ids)]`."""
    tokenizer = load_tokenizer(byte_tokenization(_CONFIG.vocab_size).tokenizer_json)
    ids: list[int] = tokenizer.encode(TEXT).ids
    return ids

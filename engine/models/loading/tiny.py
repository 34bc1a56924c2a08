"""`tiny`: a small random Llama that needs no download and is equal on every machine."""

from __future__ import annotations

import hashlib
import math

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from engine.models.config import ModelConfig, Rope
from engine.models.loading.checkpoint import Checkpoint
from engine.models.loading.tokenization import Tokenization

__all__ = ["byte_tokenization", "open_tiny"]

_SEED = 6  # gives the most varied text of the first eight seeds; a test checks that it varies
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=512,
    hidden_size=128,
    intermediate_size=384,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    context_length=8192,
    rms_norm_eps=1e-5,
    rope=Rope(theta=10_000.0),
    tie_embeddings=False,  # tied or small weights would repeat one token endlessly
    attention_bias=False,
    qk_norm=False,
)


def open_tiny() -> Checkpoint:
    """Return the checkpoint of `tiny`.

    Weights have standard deviation 1/√hidden, so greedy text varies.
    """
    tensors = _weights(_CONFIG)
    digest = hashlib.sha256()
    for tensor in tensors.values():
        digest.update(tensor.numpy().tobytes())
    return Checkpoint(
        config=_CONFIG,
        tokenization=byte_tokenization(_CONFIG.vocab_size),
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        read=tensors.__getitem__,
        digest=digest.hexdigest(),
    )


def _weights(config: ModelConfig) -> dict[str, Tensor]:
    """Return uniformly distributed weights.

    `torch.rand` is exact integer arithmetic, with equal bits on all machines; `torch.randn` uses
    approximations that differ between processors.
    """
    generator = torch.Generator("cpu").manual_seed(_SEED)
    width = math.sqrt(12 / config.hidden_size)  # a uniform variable's for deviation 1/√hidden

    def random(rows: int, columns: int) -> Tensor:
        return (torch.rand(rows, columns, generator=generator) - 0.5) * width

    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    tensors = {"model.embed_tokens.weight": random(config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": torch.ones(hidden),
            prefix + "self_attn.q_proj.weight": random(q_rows, hidden),
            prefix + "self_attn.k_proj.weight": random(kv_rows, hidden),
            prefix + "self_attn.v_proj.weight": random(kv_rows, hidden),
            prefix + "self_attn.o_proj.weight": random(hidden, q_rows),
            prefix + "post_attention_layernorm.weight": torch.ones(hidden),
            prefix + "mlp.gate_proj.weight": random(inner, hidden),
            prefix + "mlp.up_proj.weight": random(inner, hidden),
            prefix + "mlp.down_proj.weight": random(hidden, inner),
        }
    tensors["model.norm.weight"] = torch.ones(hidden)
    tensors["lm_head.weight"] = random(config.vocab_size, hidden)
    return tensors


def byte_tokenization(vocab_size: int) -> Tokenization:
    """Return a tokenizer of one token per byte, special tokens, and fillers.

    A filler decodes to its number, as `<300>`, so different tokens are different text. No text
    encodes to a filler, because there are no merges; only a random model emits them.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *_SPECIAL]
    tokens += [f"<{index}>" for index in range(len(tokens), vocab_size)]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in _SPECIAL])
    return Tokenization(
        tokenizer_json=tokenizer.to_str(),
        chat_template=_CHAT_TEMPLATE,
        bos_token="<|im_start|>",  # noqa: S106 - not a password
        eos_token="<|im_end|>",  # noqa: S106
        eos_token_ids=(vocab["<|im_end|>"], vocab["<|endoftext|>"]),
        add_bos=False,
    )

"""Helpers for tests of models: caches, functions that run a model, small models on disk."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from gguf import GGUFWriter, TokenType
from torch import Tensor

from engine.models import ModelConfig
from engine.models.decoder import AttentionCache, Transformer
from engine.models.loading.load import LoadedModel, load_model
from engine.models.loading.tiny import open_tiny
from kvcache.cache import KVCache
from kvcache.lease.identity import Identity
from kvcache.memory.layout import KVLayout
from kvcache.page_store.torch_store import TorchPageStore
from kvcache.transport.memory import MemoryNetwork, MemoryTransport
from kvcache.types import EngineId, SeqId

CPU = torch.device("cpu")


class StepCache(AttentionCache, Protocol):
    """A cache of one sequence; `begin` declares how many rows of the step are not padding."""

    def begin(self, rows: int) -> None: ...

    def end(self) -> None: ...


class DenseCache:
    """The reference: a list of key and value tensors per layer, and plain causal attention."""

    def __init__(self, config: ModelConfig) -> None:
        empty = torch.empty(0, config.num_kv_heads, config.head_dim)
        self.keys = [empty] * config.num_layers
        self.values = [empty] * config.num_layers

    def begin(self, rows: int) -> None:
        self.rows = rows

    def end(self) -> None:
        del self.rows

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = self.rows
        self.keys[layer] = torch.cat([self.keys[layer].to(k.dtype), k[:rows]])
        self.values[layer] = torch.cat([self.values[layer].to(v.dtype), v[:rows]])
        group = q.shape[1] // k.shape[1]
        keys = self.keys[layer].repeat_interleave(group, dim=1)
        values = self.values[layer].repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[:rows], keys) * q.shape[-1] ** -0.5
        mask = torch.ones(rows, keys.shape[0], dtype=torch.bool).tril(keys.shape[0] - rows)
        weights = scores.float().masked_fill(~mask, -torch.inf).softmax(-1).to(q.dtype)
        out = torch.zeros_like(q)
        out[:rows] = torch.einsum("hqk,khd->qhd", weights, values)
        return out


class PagedCache:
    """The engine's cache, with its free pages in random order."""

    PAGES = 32

    def __init__(self, config: ModelConfig) -> None:
        dimensions = (config.num_kv_heads, config.head_dim)
        layout = KVLayout(config.num_layers, self.PAGES, 16, *dimensions, torch.float32)
        transport = MemoryTransport(MemoryNetwork(), 1)
        self.cache = KVCache(
            TorchPageStore.on(transport, layout, query_heads=config.num_heads),
            transport,
            identity=Identity(EngineId("e"), 1, b"s", "f"),
        )
        taken = [SeqId(index) for index in range(1, self.PAGES)]
        for seq_id in taken:
            self.cache.add_sequence(seq_id)
            self.cache.grow(seq_id, 1)
        random.Random(0).shuffle(taken)
        for seq_id in taken:
            self.cache.remove_sequence(seq_id)
        self.seq_id = SeqId(0)
        self.cache.add_sequence(self.seq_id)
        self.attention = self.cache.attention

    def begin(self, rows: int) -> None:
        self.cache.grow(self.seq_id, self.cache.length(self.seq_id) + rows)
        self.cache.begin_forward([self.seq_id], [rows])

    def end(self) -> None:
        self.cache.end_forward()


def load(name: str | Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(str(name), dtype=dtype, device=CPU)


@torch.inference_mode()
def run(model: Transformer, cache: StepCache, tokens: Sequence[int], start: int) -> Tensor:
    """Return logits [len(tokens), vocab] of one step, padded to a multiple of four rows."""
    padding = [0] * (-len(tokens) % 4)
    positions = [*range(start, start + len(tokens)), *padding]
    cache.begin(len(tokens))
    hidden = model(torch.tensor([*tokens, *padding]), torch.tensor(positions), cache)
    cache.end()
    return model.logits(hidden)[: len(tokens)]


def run_in_steps(model: Transformer, cache: StepCache, tokens: Sequence[int]) -> Tensor:
    """Return the logits of `tokens`: a prefill, decodes, a second prefill chunk, more decodes."""
    parts, start = [], 0
    for count in (len(tokens) // 2, 1, 1, 1, len(tokens) // 4, 1, len(tokens)):
        step = tokens[start : start + count]
        if step:
            parts.append(run(model, cache, step, start))
            start += len(step)
    return torch.cat(parts)


def greedy(model: Transformer, cache: StepCache, prompt: Sequence[int], count: int) -> list[int]:
    """Return `count` greedy tokens after `prompt`, without regard to end tokens."""
    step, start, out = list(prompt), 0, []
    for _ in range(count):
        token = int(run(model, cache, step, start)[-1].argmax())
        start += len(step)
        step = [token]
        out.append(token)
    return out


def hf_model(kind: str, **settings: Any) -> Any:
    """Return a small random transformers model; biases and norms are random too."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **{
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "bos_token_id": 257,
            "eos_token_id": 258,
            "attn_implementation": "eager",
        }
        | settings
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        centre = 1.0 if "norm" in name else 0.0
        weight.normal_(centre, 0.2)
    return model


def save_folder(model: Any, folder: Path, **options: Any) -> Path:
    """Write the model as a Hugging Face folder, with the tokenizer of `tiny`."""
    model.save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text(open_tiny().tokenization.tokenizer_json)
    return folder


_STORED = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_tensors(model: Any, arch: str) -> dict[str, np.ndarray]:
    """Return a transformers model's weights as llama.cpp's converter stores them."""
    config, tensors = model.config, {}
    for name, weight in model.state_dict().items():
        array = weight.numpy()
        base, kind = name.rsplit(".", 1)
        layer = ""
        if base.startswith("model.layers."):
            _, _, index, base = base.split(".", 3)
            layer = f"blk.{index}."
        if arch == "llama" and base in ("self_attn.q_proj", "self_attn.k_proj"):
            query = base == "self_attn.q_proj"
            heads = config.num_attention_heads if query else config.num_key_value_heads
            # LlamaModel.permute of convert_hf_to_gguf.py
            shape = (heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
            array = array.reshape(shape).swapaxes(1, 2).reshape(array.shape)
        if base == "lm_head" and config.tie_word_embeddings:
            continue
        tensors[f"{layer}{_STORED[base]}.{kind}"] = np.ascontiguousarray(array)
    return tensors


def write_gguf(
    path: Path, tensors: dict[str, np.ndarray], config: Any, arch: str, **metadata: Any
) -> Path:
    """Write a GGUF file; `metadata` overrides values by key (dots as __), None removes them."""
    values: dict[str, Any] = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": getattr(config, "head_dim", None),
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_parameters["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [
            "a",
            "b",
            "ab",
            *(f"t{index}" for index in range(3, config.vocab_size)),
        ],
        "tokenizer.ggml.token_type": [int(TokenType.NORMAL)] * config.vocab_size,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 258,
    }
    values |= {key.replace("__", "."): value for key, value in metadata.items()}
    writer = GGUFWriter(path, arch)
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

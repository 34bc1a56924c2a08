"""Logits agree with transformers' own implementation on the same weights, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_helpers import (
    DenseCache,
    gguf_tensors,
    hf_model,
    load,
    run_in_steps,
    save_folder,
    write_gguf,
)

from engine.models.config import Llama3Scaling

TOKENS = torch.randint(0, 512, (61,), generator=torch.Generator().manual_seed(1)).tolist()

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"head_dim": 24}),
    "mistral-window": ("Mistral", {"sliding_window": 64}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-bias": ("Qwen3", {"head_dim": 32, "attention_bias": True}),
}


def reference(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


@pytest.mark.parametrize("case", CASES)
def test_folder(case, tmp_path, make_cache):
    kind, settings = CASES[case]
    model = hf_model(kind, **settings)
    ours = load(save_folder(model, tmp_path))
    logits = run_in_steps(ours.transformer, make_cache(ours.config), TOKENS)
    torch.testing.assert_close(logits, reference(model), atol=1e-4, rtol=0)


def test_sharded_folder_is_the_same_model(tmp_path):
    model = hf_model("Llama")
    whole = load(save_folder(model, tmp_path / "whole"))
    sharded = load(save_folder(model, tmp_path / "sharded", max_shard_size="100KB"))
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 2
    for (name, a), b in zip(
        whole.transformer.named_parameters(), sharded.transformer.parameters(), strict=True
    ):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("case", ["llama", "llama-tied", "llama-bias", "qwen2", "qwen3"])
def test_gguf(case, tmp_path, make_cache):
    kind, settings = CASES[case]
    model = hf_model(kind, **settings)
    arch = kind.lower()
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(model, arch), model.config, arch)
    ours = load(path)
    logits = run_in_steps(ours.transformer, make_cache(ours.config), TOKENS)
    torch.testing.assert_close(logits, reference(model), atol=1e-4, rtol=0)


def test_gguf_with_yarn(tmp_path, make_cache):
    model = hf_model("Qwen2", rope_parameters=YARN)
    scaling = {
        "qwen2__rope__scaling__type": "yarn",
        "qwen2__rope__scaling__factor": 4.0,
        "qwen2__rope__scaling__original_context_length": 64,
    }
    tensors = gguf_tensors(model, "qwen2")
    ours = load(write_gguf(tmp_path / "m.gguf", tensors, model.config, "qwen2", **scaling))
    logits = run_in_steps(ours.transformer, make_cache(ours.config), TOKENS)
    torch.testing.assert_close(logits, reference(model), atol=1e-4, rtol=0)


def test_gguf_states_llama3_scaling_as_factors(tmp_path, make_cache):
    """llama.cpp writes `rope_freqs.weight`: plain frequencies divided by the scaled ones."""
    from engine.models.config import Rope
    from engine.models.rope import _frequencies

    scaling = Llama3Scaling(8.0, 1.0, 4.0, 64)
    model = hf_model("Llama", rope_parameters=LLAMA3)
    plain, _ = _frequencies(Rope(10_000.0), 16)
    scaled, _ = _frequencies(Rope(10_000.0, scaling), 16)
    tensors = gguf_tensors(model, "llama") | {"rope_freqs.weight": (plain / scaled).numpy()}
    ours = load(write_gguf(tmp_path / "m.gguf", tensors, model.config, "llama"))
    logits = run_in_steps(ours.transformer, make_cache(ours.config), TOKENS)
    torch.testing.assert_close(logits, reference(model), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(dtype, tmp_path):
    model = hf_model("Qwen3", head_dim=32)
    ours = load(save_folder(model, tmp_path), dtype)
    assert {weight.dtype for weight in ours.transformer.parameters()} == {dtype}
    logits = run_in_steps(ours.transformer, DenseCache(ours.config), TOKENS)
    assert logits.dtype == torch.float32
    expected = reference(model)
    assert (logits - expected).abs().mean() < 0.05 * expected.abs().mean()

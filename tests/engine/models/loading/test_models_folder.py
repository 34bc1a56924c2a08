"""Hugging Face folders: what is read from which file, and the error for each defect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_helpers import hf_model, load, save_folder
from safetensors.torch import load_file, save_file

from engine.models import (
    CorruptModel,
    MissingFile,
    UnsupportedArchitecture,
    UnsupportedDtype,
)
from engine.models.config import Llama3Scaling, Rope, YarnScaling
from engine.models.loading.fields import Fields
from engine.models.loading.hf_config import read_config

Edit = Callable[..., None]


@pytest.fixture(scope="module")
def model() -> Any:
    return hf_model("Llama", num_hidden_layers=2)


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    return save_folder(model, tmp_path / "model")


@pytest.fixture
def edit(folder: Path) -> Edit:
    """Return a function that changes keys of a JSON file in the folder; None removes a key."""

    def edit(name: str, **changes: Any) -> None:
        path = folder / name
        values = json.loads(path.read_text()) if path.exists() else {}
        values |= changes
        path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))

    return edit


@pytest.fixture(scope="module")
def sharded(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(model, tmp_path_factory.mktemp("sharded"), max_shard_size="100KB")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_file(name, folder):
    (folder / name).unlink()
    with pytest.raises(MissingFile, match=f"lacks {name}"):
        load(folder)


def test_missing_shard_is_named(sharded):
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    hidden = shard.rename(shard.with_suffix(".hidden"))
    with pytest.raises(MissingFile, match=f"lacks {shard.name}"):
        load(sharded)
    hidden.rename(shard)


def test_shard_outside_the_folder(sharded, tmp_path):
    index = sharded / "model.safetensors.index.json"
    before = index.read_text()
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(CorruptModel, match="names no files of this folder"):
        load(sharded)
    index.write_text(before)


@pytest.mark.parametrize("keep", [0, 5, 100, 2000, -1])
def test_truncated_weights(keep, folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorruptModel, match=r"model\.safetensors is damaged"):
        load(folder)


def test_flipped_header(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[12] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(CorruptModel, match=r"model\.safetensors is damaged"):
        load(folder)


def test_missing_and_unknown_tensors(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, path)
    with pytest.raises(CorruptModel, match=r"lack tensor model\.norm\.weight"):
        load(folder)
    save_file(tensors | {"model.norm.weight": norm, "model.strange": torch.ones(1)}, path)
    with pytest.raises(UnsupportedArchitecture, match=r"like model\.strange"):
        load(folder)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}  # of old checkpoints
    save_file(tensors | {"model.norm.weight": norm} | buffer, path)
    load(folder)


def test_weights_of_a_dtype_that_cannot_be_read(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"model.norm.weight": torch.ones(64, dtype=torch.int8)}, path)
    with pytest.raises(UnsupportedDtype, match=r"model\.norm\.weight is stored as I8"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn])
def test_dtype_to_compute_in(dtype, folder):
    with pytest.raises(UnsupportedDtype, match=f"{dtype} is not supported; supported are torch"):
        load(folder, dtype)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, UnsupportedArchitecture, "GemmaForCausalLM"),
        ({"architectures": None, "model_type": "phi3"}, UnsupportedArchitecture, "phi3"),
        ({"architectures": None, "model_type": None}, CorruptModel, "lacks model_type"),
        ({"hidden_act": "gelu"}, UnsupportedArchitecture, "hidden_act = gelu"),
        ({"mlp_bias": True}, UnsupportedArchitecture, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, UnsupportedArchitecture, "quantization_config"),
        ({"hidden_size": "many"}, CorruptModel, "hidden_size should be an integer"),
        ({"hidden_size": 32}, CorruptModel, r"shape \[512, 64\], not \[512, 32\]"),
        ({"num_hidden_layers": 3}, CorruptModel, "2 layers, not 3"),
        ({"num_attention_heads": 0}, CorruptModel, "0 attention heads"),
        ({"num_key_value_heads": 3}, CorruptModel, "cannot share"),
        ({"vocab_size": 10}, CorruptModel, "token 511, the embedding only 10"),
    ],
)
def test_config_that_cannot_be_served(changes, error, message, folder, edit):
    edit("config.json", **changes)
    with pytest.raises(error, match=message):
        load(folder)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_unknown_rope_scaling(kind, folder, edit):
    edit("config.json", rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(UnsupportedArchitecture, match=f"{kind}.*supported are linear, llama3"):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_invalid_json(name, folder):
    (folder / name).write_text('{"truncated": ')
    with pytest.raises(CorruptModel):
        load(folder)


def test_rope_of_both_generations_of_transformers():
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 131072,
    }
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768}
    wanted = {
        "default": None,
        "llama3": Llama3Scaling(8.0, 1.0, 4.0, 8192),
        "yarn": YarnScaling(4.0, 32768, attention_factor=1.138629436111989),
    }
    for kind, numbers in {"default": {}, "llama3": llama3, "yarn": yarn}.items():
        old = {"rope_theta": 5e5, "rope_scaling": {"rope_type": kind, **numbers}}
        older = {"rope_theta": 5e5, "rope_scaling": {"type": kind, **numbers}}
        new = {"rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **numbers}}
        for form in (old, older, new):
            assert read_config(Fields(config | form, "")).rope == Rope(5e5, wanted[kind])
    assert read_config(Fields(config | {"rope_scaling": None}, "")).rope == Rope(10_000.0)


@pytest.mark.parametrize(
    ("architecture", "settings", "window"),
    [
        ("MistralForCausalLM", {"sliding_window": 100}, 100),
        ("MistralForCausalLM", {"sliding_window": None}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 100, "use_sliding_window": False}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 100, "use_sliding_window": True}, 100),
        ("Qwen3ForCausalLM", {"sliding_window": 1000, "use_sliding_window": True}, 1000),
    ],
)
def test_a_window_in_use_caps_the_context(architecture, settings, window):
    config = {
        "architectures": [architecture],
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 500,
    }
    read = read_config(Fields(config | settings, ""))
    assert (read.sliding_window, read.context_length) == (window, min(500, window or 500))


def test_special_tokens_and_template(folder, edit):
    assert load(folder).chat_template is None
    assert load(folder).eos_token_ids == (258,)
    token = {"content": "<|im_end|>", "special": True}
    templates = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    edit("tokenizer_config.json", eos_token=token, chat_template=templates)
    edit("special_tokens_map.json", bos_token="<|im_start|>", eos_token="unused")
    edit("generation_config.json", eos_token_id=[300, 258])
    edit("config.json", eos_token_id=301)
    model = load(folder)
    assert (model.bos_token, model.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert model.eos_token_ids == (300, 258, 301)
    assert model.chat_template == "D"
    assert not model.add_bos
    edit("tokenizer_config.json", chat_template="S")
    assert load(folder).chat_template == "S"
    (folder / "chat_template.jinja").write_text("J")
    assert load(folder).chat_template == "J"


def test_add_bos_is_what_the_tokenizer_does(folder, edit):
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<|im_start|>", "$A"], special_tokens=[("<|im_start|>", 257)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    edit("tokenizer_config.json", bos_token="<|im_start|>")
    assert load(folder).add_bos


def test_digest_changes_with_a_weight(folder, sharded):
    before = load(folder).weights_digest
    assert load(folder).weights_digest == before
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-6] ^= 1
    path.write_bytes(content)
    assert load(folder).weights_digest != before
    assert len(load(sharded).weights_digest) == 64

"""Reader of Hugging Face's `config.json`, in the formats before and since transformers 5."""

from __future__ import annotations

import math

from engine.models.config import (
    Architecture,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    Rope,
    Scaling,
    YarnScaling,
)
from engine.models.errors import CorruptModel, UnsupportedArchitecture
from engine.models.loading.fields import Fields

__all__ = ["read_config"]

_MODEL_CLASSES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def read_config(config: Fields) -> ModelConfig:
    """Return the model's configuration; absent keys have the defaults of transformers.

    Raises: `UnsupportedArchitecture` for an architecture or a setting that is not implemented,
    `CorruptModel` for invalid values.
    """
    architecture = _architecture(config)
    _refuse_unsupported(config)
    heads = config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    if not 1 <= heads <= hidden:
        raise CorruptModel(f"{config.origin}: {heads} attention heads in {hidden} dimensions")
    default_dim = 128 if architecture == "qwen3" else hidden // heads
    context = config.integer("max_position_embeddings")
    window = _sliding_window(config, architecture)
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", default_dim),
        context_length=min(context, window or context),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=_rope(config, context),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        attention_bias=config.flag("attention_bias", architecture == "qwen2"),
        qk_norm=architecture == "qwen3",
        sliding_window=window,
    )


def _architecture(config: Fields) -> Architecture:
    classes = config.strings("architectures", [])
    name = classes[0] if classes else config.text("model_type")
    for model_class, architecture in _MODEL_CLASSES.items():
        if name in (model_class, architecture):
            return architecture
    raise UnsupportedArchitecture(
        f"{config.origin}: {name} is not supported; supported are {', '.join(_MODEL_CLASSES)}"
    )


def _refuse_unsupported(config: Fields) -> None:
    """Raise `UnsupportedArchitecture` for settings that would need code not implemented here."""
    unsupported = {
        "hidden_act": config.text("hidden_act", "silu") != "silu",
        "mlp_bias": config.flag("mlp_bias", False),
        "quantization_config": "quantization_config" in config,
        "partial_rotary_factor": config.number("partial_rotary_factor", 1.0) != 1.0,
    }
    for key, is_set in unsupported.items():
        if is_set:
            raise UnsupportedArchitecture(
                f"{config.origin}: {key} = {str(config.values[key])[:80]} is not supported"
            )


def _sliding_window(config: Fields, architecture: Architecture) -> int | None:
    """Return the sliding window if layers use it. Qwen has a switch in addition to the size."""
    if architecture == "llama" or "sliding_window" not in config:
        return None
    if architecture != "mistral" and not config.flag("use_sliding_window", False):
        return None
    return config.integer("sliding_window")


def _rope(config: Fields, context: int) -> Rope:
    """Read `rope_parameters` (since transformers 5), or `rope_theta` and `rope_scaling`."""
    new = "rope_parameters" in config
    rope = config.fields("rope_parameters" if new else "rope_scaling")
    theta = (rope if "rope_theta" in rope else config).number("rope_theta", 10_000.0)
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedArchitecture(f"{rope.origin}: partial rotation is not supported")
    kind = rope.text("rope_type" if "rope_type" in rope else "type", "default")
    return Rope(theta, _scaling(kind, rope, context))


def _scaling(kind: str, rope: Fields, context: int) -> Scaling | None:
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(_positive(rope, "factor"))
        case "llama3":
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            if not low < high:
                raise CorruptModel(f"{rope.origin}: low_freq_factor is not below high_freq_factor")
            original = _positive_integer(rope, "original_max_position_embeddings", context)
            return Llama3Scaling(_positive(rope, "factor"), low, high, original)
        case "yarn":
            return _yarn(rope, context)
        case _:
            raise UnsupportedArchitecture(
                f"{rope.origin}: RoPE scaling {kind!r} is not supported; "
                "supported are linear, llama3 and yarn"
            )


def _yarn(rope: Fields, context: int) -> YarnScaling:
    original = _positive_integer(rope, "original_max_position_embeddings", context)
    factor = _positive(rope, "factor")
    attention = mscale(factor)
    if "mscale" in rope and "mscale_all_dim" in rope:
        mild, full = rope.number("mscale"), rope.number("mscale_all_dim")
        attention = mscale(factor, mild) / mscale(factor, full)
    return YarnScaling(
        factor=factor,
        original_context=original,
        attention_factor=rope.number("attention_factor", attention),
        beta_fast=_positive(rope, "beta_fast", 32.0),
        beta_slow=_positive(rope, "beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
    )


def mscale(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's attention temperature as a factor of cos and sin (arXiv 2309.00071, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _positive(rope: Fields, key: str, default: float | None = None) -> float:
    value = rope.number(key, default)
    if not value > 0:
        raise CorruptModel(f"{rope.origin}: {key} is {value}; it must be positive")
    return value


def _positive_integer(rope: Fields, key: str, default: int) -> int:
    value = rope.integer(key, default)
    if value < 1:
        raise CorruptModel(f"{rope.origin}: {key} is {value}; it must be positive")
    return value

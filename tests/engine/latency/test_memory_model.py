"""Pools as large as published ones, and clear words where nothing fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.latency import DEVICES, MODELS, pool_tokens
from engine.protocol import BadRequest

A100 = DEVICES["a100"]


@pytest.mark.parametrize(
    ("model", "tp", "pp", "tokens"),
    [
        ("opt-13b", 1, 1, 66144),
        ("opt-13b", 1, 4, 356752),
        ("opt-13b", 2, 1, 163008),
        ("opt-13b", 4, 1, 356736),
        ("opt-13b", 8, 8, 6168896),
        ("opt-66b", 2, 1, 11600),
        ("opt-66b", 1, 8, 212320),
        ("opt-66b", 3, 1, 45056),
        ("opt-66b", 4, 1, 78496),
        ("opt-66b", 8, 8, 2085696),
        ("opt-175b", 1, 6, 26208),
        ("opt-175b", 3, 3, 76192),
        ("opt-175b", 8, 8, 992400),
    ],
)
def test_distserves_published_pools(model: str, tp: int, pp: int, tokens: int):
    """From DistServe's `max_num_tokens.csv`: to one page of 16 tokens, or one in ten thousand."""
    ours = pool_tokens(MODELS[model], A100, tp=tp, pp=pp)
    assert abs(ours - tokens) <= max(16, 1e-4 * tokens)
    assert ours % 16 == 0


@pytest.mark.parametrize(
    ("model", "tp", "pp"),
    [("opt-66b", 1, 1), ("opt-175b", 1, 4), ("opt-175b", 4, 1), ("opt-175b", 2, 2)],
)
def test_what_the_table_lacks_does_not_fit(model: str, tp: int, pp: int):
    with pytest.raises(BadRequest, match=f"no room for KV .* use more than {tp * pp} devices"):
        pool_tokens(MODELS[model], A100, tp=tp, pp=pp)


@pytest.mark.parametrize(("tp", "pp"), [(1, 3), (7, 1), (0, 1), (1, 0), (-1, 1)])
def test_layers_and_heads_are_divided_whole(tp: int, pp: int):
    with pytest.raises(BadRequest, match="40 layers and 40 heads cannot be divided"):
        pool_tokens(MODELS["opt-13b"], A100, tp=tp, pp=pp)


@pytest.mark.parametrize(
    ("model", "billions", "kv_bytes"),
    [
        ("opt-13b", 12.9, 819_200),
        ("llama2-13b", 13.0, 819_200),
        ("opt-66b", 65.7, 2_359_296),
        ("opt-175b", 174.6, 4_718_592),
        ("llama-3.1-8b", 8.03, 131_072),
        ("llama2-70b", 69.0, 327_680),
        ("bloom-176b", 176.2, 4_014_080),
    ],
)
def test_the_models_sizes(model: str, billions: float, kv_bytes: int):
    shape = MODELS[model]
    assert shape.weight_bytes / 2e9 == pytest.approx(billions, rel=5e-3)
    assert shape.kv_bytes_per_token == kv_bytes


@pytest.mark.parametrize(
    ("context", "gigabytes"),
    [(10_000, 8.19), (100_000, 81.9), (500_000, 409.6), (1_000_000, 819.2)],
)
def test_infinite_llm_table_1(context: int, gigabytes: float):
    """The KV of LLaMA2-13B by context length, beside 26 GB of weights."""
    shape = MODELS["llama2-13b"]
    assert context * shape.kv_bytes_per_token / 1e9 == pytest.approx(gigabytes, rel=1e-3)
    assert shape.weight_bytes / 1e9 == pytest.approx(26, abs=0.5)


def test_pages_are_whole_and_memory_decides():
    model = MODELS["llama-3.1-8b"]
    assert pool_tokens(model, A100, page_size=64) % 64 == 0
    tokens = pool_tokens(model, A100)
    more = replace(A100, memory=A100.memory + model.kv_bytes_per_token * 1600)
    assert pool_tokens(model, more, usable=0.93) - tokens == pytest.approx(0.93 * 1600, abs=16)
    assert pool_tokens(model, A100, usable=0.5) < tokens / 2

"""Whether queries go to the KV or the KV to the queries, in bytes; and how much KV there is."""

from __future__ import annotations

import pytest
import torch

from kvcache.errors import BadRequest
from kvcache.memory.layout import KVLayout
from kvcache.remote_attention.debtor.ship_or_pull import pulled_bytes, ship_queries, shipped_bytes

SMOLLM2 = {"heads": 9, "kv_heads": 3, "head_dim": 64, "element_bytes": 4}
LLAMA2_13B = {"heads": 40, "kv_heads": 40, "head_dim": 128, "element_bytes": 2}


@pytest.mark.parametrize(
    ("tokens", "gigabytes"), [(10_000, 8.192), (100_000, 81.92), (500_000, 409.6), (10**6, 819.2)]
)
def test_the_kv_of_llama2_13b_is_that_of_table_1(tokens: int, gigabytes: float):
    """Infinite-LLM, Table 1: 8.19, 81.9, 409.6 and 819.2 GB; 819,200 bytes per token."""
    layout = KVLayout(40, 1, 16, 40, 128, torch.float16)
    assert layout.page_bytes // layout.page_size == 819_200
    layer = pulled_bytes(tokens, kv_heads=40, head_dim=128, element_bytes=2)
    assert 40 * layer == layout.page_bytes * layout.pages_for(tokens) == gigabytes * 10**9


def test_a_decode_ships_its_query_from_the_second_token_on():
    """L_q·(2·H·d·b + 8·H) is 20,800 bytes, and a token's KV 20,480."""
    assert shipped_bytes(1, heads=40, head_dim=128, element_bytes=2) == 20_800
    assert pulled_bytes(1, kv_heads=40, head_dim=128, element_bytes=2) == 20_480
    assert not ship_queries(1, 1, **LLAMA2_13B)
    assert ship_queries(1, 2, **LLAMA2_13B)


def test_a_chunk_of_a_prompt_pulls_unless_the_remote_context_is_longer():
    """With grouped heads a query is larger than its token's KV: here 4,680 bytes for 1,536."""
    assert shipped_bytes(512, heads=9, head_dim=64, element_bytes=4) == 512 * 4680
    assert not ship_queries(512, 1560, **SMOLLM2)  # both are 2,396,160 bytes
    assert ship_queries(512, 1561, **SMOLLM2)


def test_each_part_adds_a_result():
    assert shipped_bytes(2, heads=9, head_dim=64, element_bytes=4, parts=3) == 2 * (
        2304 + 3 * (2304 + 72)
    )
    assert ship_queries(1, 4, **SMOLLM2, parts=1)
    assert not ship_queries(1, 4, **SMOLLM2, parts=3)
    assert not ship_queries(0, 0, **SMOLLM2)
    assert ship_queries(0, 1, **SMOLLM2)


@pytest.mark.parametrize("name", ["heads", "kv_heads", "head_dim", "element_bytes"])
def test_bad_shapes_are_refused(name: str):
    with pytest.raises(BadRequest, match="not positive"):
        ship_queries(1, 1, **{**SMOLLM2, name: 0})


@pytest.mark.parametrize(("rows", "tokens", "parts"), [(-1, 1, 1), (1, -1, 1), (1, 1, -1)])
def test_negative_counts_are_refused(rows: int, tokens: int, parts: int):
    with pytest.raises(BadRequest, match="negative"):
        ship_queries(rows, tokens, **SMOLLM2, parts=parts)

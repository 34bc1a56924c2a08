from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcache.memory.layout import KVLayout
from kvcache.shard import Shard, split

LAYOUT = KVLayout(layers=3, pages=5, page_size=4, kv_heads=2, head_dim=8, dtype=torch.float32)


def test_bytes_are_those_of_the_pool():
    pool = torch.zeros(LAYOUT.shape, dtype=LAYOUT.dtype)
    assert LAYOUT.nbytes == pool.nbytes
    assert LAYOUT.page_bytes == pool[:, 0].nbytes
    assert LAYOUT.token_bytes == pool[0, 0, :, 0].nbytes


def test_a_page_of_a_layer_is_contiguous():
    pool = LAYOUT.view(torch.arange(LAYOUT.nbytes // 4, dtype=LAYOUT.dtype))
    assert pool.shape == LAYOUT.shape
    page = pool[:, 2]
    assert page.is_contiguous()
    assert page.data_ptr() == pool.data_ptr() + 2 * LAYOUT.page_bytes


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_pages_for_rounds_up(tokens: int, pages: int):
    assert LAYOUT.pages_for(tokens) == pages


def test_a_shards_layout_has_its_layers_and_heads():
    part = replace(LAYOUT, shard=Shard(1, 3, 0, 1))
    pool = torch.zeros(part.shape, dtype=part.dtype)
    assert pool.shape == (2, 5, 2, 4, 1, 8)
    assert part.nbytes == pool.nbytes
    assert part.layer_bytes == pool[0, 0].nbytes
    assert part.token_bytes == pool[0, 0, :, 0].nbytes
    assert part.head_bytes == pool[0, 0, 0, 0, 0].nbytes
    assert LAYOUT.held == Shard(0, 3, 0, 2)


def test_all_shards_of_a_model_have_one_fingerprint():
    parts = [replace(LAYOUT, shard=shard) for shard in split(3, 2, pp=2, tp=2)]
    assert {part.fingerprint("w") for part in parts} == {LAYOUT.fingerprint("w")}


def test_pools_of_different_size_have_one_fingerprint():
    assert LAYOUT.fingerprint("w") == replace(LAYOUT, pages=99).fingerprint("w")


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 4},
        {"page_size": 8},
        {"kv_heads": 1},
        {"head_dim": 16},
        {"dtype": torch.bfloat16},
    ],
)
def test_whatever_changes_a_page_changes_the_fingerprint(change: dict[str, object]):
    assert LAYOUT.fingerprint("w") != replace(LAYOUT, **change).fingerprint("w")  # type: ignore[arg-type]


def test_other_weights_have_another_fingerprint():
    assert LAYOUT.fingerprint("w") != LAYOUT.fingerprint("v")

"""Re-sharding (DistServe): every layer and head of every receiver is written once, by its owner."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.errors import BadRequest
from kvcache.shard import Shard, overlap, split


@given(st.data(), st.integers(1, 40), st.integers(1, 16))
def test_any_two_splits_of_a_model_copy_each_element_once(
    data: st.DataObject, layers: int, heads: int
) -> None:
    def parts() -> list[Shard]:
        pp, tp = data.draw(st.integers(1, layers)), data.draw(st.integers(1, heads))
        return split(layers, heads, pp=pp, tp=tp)

    whole = np.arange(layers * heads).reshape(layers, heads) + 1
    senders, receivers = parts(), parts()
    for receiver in receivers:
        pool = np.zeros((receiver.layers, receiver.heads), dtype=int)
        for sender in senders:
            held = whole[sender.layer : sender.layer_end, sender.head : sender.head_end]
            common = overlap(sender, receiver)
            if common is None:
                continue
            into = pool[list(common.layers_in(receiver)), common.heads_in(receiver)]
            assert not into.any(), "written twice"
            pool[list(common.layers_in(receiver)), common.heads_in(receiver)] = held[
                list(common.layers_in(sender)), common.heads_in(sender)
            ]
        wanted = whole[receiver.layer : receiver.layer_end, receiver.head : receiver.head_end]
        assert np.array_equal(pool, wanted)


def test_splits_are_even_and_whole() -> None:
    assert split(5, 3, pp=2, tp=2) == [
        Shard(0, 3, 0, 2),
        Shard(0, 3, 2, 3),
        Shard(3, 5, 0, 2),
        Shard(3, 5, 2, 3),
    ]


def test_equal_splits_pair_equal_parts() -> None:
    workers = split(8, 8, pp=2, tp=4)
    pairs = [(a, b) for a in workers for b in workers if overlap(a, b)]
    assert pairs == [(a, a) for a in workers]


@pytest.mark.parametrize(("pp", "tp"), [(0, 1), (5, 1), (1, 0), (1, 3), (-1, 1)])
def test_more_parts_than_layers_or_heads_is_an_error(pp: int, tp: int) -> None:
    with pytest.raises(BadRequest):
        split(4, 2, pp=pp, tp=tp)

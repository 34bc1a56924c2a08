"""The size of the pool: what bounds it, and the reason that is given."""

from __future__ import annotations

from typing import Any

import pytest

from engine.protocol import BadRequest
from engine.sizing import Memory, choose_pool

GIB = 1 << 30
SMOLLM2 = {"page_bytes": 368_640, "context_pages": 512, "sequences": 256}
LLAMA_8B = {"page_bytes": 2 << 20, "context_pages": 8192, "sequences": 256}  # a context: 16 GiB


def choose(
    model: dict[str, int], limit: float, available: float, share: float = 1.0, **more: Any
) -> tuple[float, str]:
    """Return the pool's GiB and the reason; limit and available memory are in GiB."""
    memory = Memory(int(limit * GIB), int(available * GIB), "the test")
    size = choose_pool(**{**model, **more}, memory=memory, share=share)
    return size.pages * model["page_bytes"] / GIB, size.reason


def test_a_small_model_takes_a_tenth_of_the_memory():
    pool, reason = choose(SMOLLM2, 24, 20)
    assert pool == pytest.approx(2.4, abs=0.01)
    assert reason == "10.0% of 24.0 GiB (the test), at most 4 GiB"


def test_engines_of_one_start_divide_it():
    pool, reason = choose(SMOLLM2, 24, 20, 0.5)
    assert pool == pytest.approx(1.2, abs=0.01)
    assert reason.startswith("5.0%")


def test_much_memory_is_not_taken_without_need():
    assert choose(SMOLLM2, 512, 500)[0] == pytest.approx(4, abs=0.01)


def test_contexts_of_full_length_may_need_more():
    pool, reason = choose(LLAMA_8B, 128, 100)
    assert pool == 32
    assert reason == "2 contexts of full length"


@pytest.mark.parametrize(("share", "pool"), [(1.0, 4.0), (0.5, 2.0), (0.25, 1.0)])
def test_the_available_memory_bounds_it(share: float, pool: float):
    """As in a container of 24 GiB, once the weights of 16 GiB are loaded."""
    chosen, reason = choose(LLAMA_8B, 24, 8, share)
    assert chosen == pool
    assert "of the available 8.0 GiB" in reason and "24.0 GiB (the test)" in reason


def test_no_more_than_the_running_sequences_can_use():
    pool, reason = choose(SMOLLM2, 64, 60, sequences=4, context_pages=64)
    assert pool == pytest.approx(4 * 64 * 368_640 / GIB)
    assert reason == "all that 4 sequences of full length can use"


def test_a_lease_of_a_full_context_fits_beside_its_sequence():
    pool, _ = choose(SMOLLM2, 64, 60, sequences=1)
    assert pool == pytest.approx(2 * 512 * 368_640 / GIB)


def test_short_contexts_need_few_pages():
    pool, _ = choose(SMOLLM2, 64, 60, sequences=1, context_pages=1)
    assert pool == pytest.approx(2 * 368_640 / GIB)


def test_too_little_memory_is_an_error_that_says_so():
    with pytest.raises(BadRequest, match=r"2 MiB of memory are available.*1.0 GiB \(the test\)"):
        choose(SMOLLM2, 1, 0.002)

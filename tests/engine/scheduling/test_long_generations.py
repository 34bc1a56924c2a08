"""Rules of long generations that no history of steps meets reliably."""

from __future__ import annotations

from typing import Any

from engine_helpers import generation

from engine.scheduling.long_generations import LongGenerations


class Elsewhere:
    """Blocks elsewhere, of which one sequence has no pages any more."""

    block_tokens = 128

    def __init__(self, gone: int) -> None:
        self._gone = gone

    def most_rows(self, seq_id: int) -> int:
        if seq_id == self._gone:
            raise KeyError(seq_id)
        return 100

    def away(self, seq_id: int) -> int:
        return 1


def test_a_generation_that_is_preempted_in_a_plan_is_not_asked_about_in_it():
    """Its sequence is gone; another one of the same plan asks what creditors still compute."""
    cache: Any = None
    long = LongGenerations(cache, lambda: None)
    one, other = generation(1, [1] * 10), generation(2, [2] * 10)
    long._granted = {one: 30, other: 20}
    elsewhere: Any = Elsewhere(gone=1)
    long.forget(one)
    assert long._most_rows(elsewhere, other) == 100

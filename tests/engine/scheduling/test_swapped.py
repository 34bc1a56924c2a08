"""`SwappedGenerations` over a cache whose moves end when the test says so."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import pytest
from engine_helpers import generation

from engine.scheduling.swapped import SwappedGenerations
from kvcache.errors import NoCapacity
from kvcache.sequences import SequenceCache
from kvcache.types import SeqId


class Cache:
    def __init__(self) -> None:
        self.moves: list[Future[int]] = []
        self.removed: list[SeqId] = []
        self.full = False

    def swap_out(self, seq_id: SeqId) -> Future[int]:
        return self._move()

    def swap_in(self, seq_id: SeqId, length: int = 0) -> Future[int]:
        return self._move()

    def remove_sequence(self, seq_id: SeqId) -> None:
        self.removed.append(seq_id)

    def _move(self) -> Future[int]:
        if self.full:
            raise NoCapacity("full")
        self.moves.append(Future())
        return self.moves[-1]


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def woken() -> list[None]:
    return []


@pytest.fixture
def swapped(cache: Cache, woken: list[None]) -> SwappedGenerations:
    return SwappedGenerations(cast(SequenceCache, cast(Any, cache)), lambda: woken.append(None))


def test_a_generation_moves_out_and_back(
    cache: Cache, woken: list[None], swapped: SwappedGenerations
):
    job = generation(1, [1, 2, 3])
    assert job not in swapped
    assert swapped.swap_out(job)
    assert job in swapped and swapped.moving
    swapped.swap_in(job)  # has no effect while it moves
    assert len(cache.moves) == 1
    cache.moves[0].set_result(3)
    assert len(woken) == 1
    assert job in swapped and not swapped.moving
    cache.full = True
    swapped.swap_in(job)  # nor without room
    assert len(cache.moves) == 1
    cache.full = False
    swapped.swap_in(job)
    assert swapped.moving and swapped.returned() == []
    swapped.swap_in(job)
    assert len(cache.moves) == 2
    cache.moves[1].set_result(3)
    assert len(woken) == 2
    assert swapped.returned() == [job]
    assert job not in swapped and not swapped.moving and swapped.returned() == []
    swapped.remove(job)
    assert cache.removed == []


def test_without_room_in_a_tier_nothing_is_swapped(cache: Cache, swapped: SwappedGenerations):
    job = generation(1, [1, 2, 3])
    cache.full = True
    assert not swapped.swap_out(job)
    assert job not in swapped and not swapped.moving


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("moves_in", [False, True])
def test_a_removed_generation_takes_its_sequence_along(
    cache: Cache, swapped: SwappedGenerations, ended: bool, moves_in: bool
):
    job = generation(1, [1, 2, 3])
    swapped.swap_out(job)
    if moves_in:
        cache.moves[-1].set_result(3)
        swapped.swap_in(job)
    if ended:
        cache.moves[-1].set_result(3)
    swapped.remove(job)
    assert cache.removed == [job.seq_id]
    assert job not in swapped and not swapped.moving and swapped.returned() == []

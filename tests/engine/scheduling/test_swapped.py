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
        self.lengths: list[int] = []  # asked for by each move in
        self.full = False

    def swap_out(self, seq_id: SeqId) -> Future[int]:
        return self._move()

    def swap_in(self, seq_id: SeqId, length: int = 0) -> Future[int]:
        moved = self._move()
        self.lengths.append(length)
        return moved

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


def test_the_outcome_of_each_move_is_told(cache: Cache, swapped: SwappedGenerations):
    job = generation(1, [1, 2, 3])
    assert swapped.swap_in(job)  # it is not out
    assert swapped.swap_out(job)
    assert swapped.swap_in(job)  # it moves
    cache.moves[0].set_result(3)
    cache.full = True
    assert not swapped.swap_in(job)
    assert job in swapped and not swapped.moving
    cache.full = False
    assert swapped.swap_in(job)
    assert cache.lengths == [3]  # room for all its tokens
    assert swapped.swap_in(job)


def test_generations_move_independently(
    cache: Cache, woken: list[None], swapped: SwappedGenerations
):
    jobs = [generation(number, [1, 2, 3]) for number in range(4)]
    for job in jobs[:3]:
        swapped.swap_out(job)
    cache.moves[0].set_result(3)
    assert swapped.moving  # the others do
    for move in cache.moves[1:]:
        move.set_result(3)
    assert not swapped.moving and [job in swapped for job in jobs] == [True] * 3 + [False]
    for job in jobs[:2]:
        swapped.swap_in(job)
    cache.moves[4].set_result(3)
    assert swapped.moving and swapped.returned() == [jobs[1]]
    assert [job in swapped for job in jobs] == [True, False, True, False]
    swapped.remove(jobs[3])
    swapped.remove(jobs[1])
    assert cache.removed == []
    cache.moves[3].set_result(3)
    assert swapped.returned() == [jobs[0]] and not swapped.moving
    assert len(woken) == 5
    swapped.remove(jobs[2])
    swapped.remove(jobs[2])
    assert cache.removed == [jobs[2].seq_id]

from __future__ import annotations

import pytest

from kvcache.errors import Internal, NoCapacity
from kvcache.pages.page_manager import PageManager

SIZE = 2


class Tier:
    """Remembers what it was offered."""

    def __init__(self) -> None:
        self.offered: list[list[int]] = []

    def offer(self, tokens: list[int]) -> None:
        self.offered.append(list(tokens))


def test_nothing_is_reserved_at_first():
    assert PageManager(9, SIZE).reserved == 0


def test_as_many_pages_are_left_as_asked():
    manager = PageManager(9, SIZE)
    with pytest.raises(NoCapacity):
        manager.take(6, leaving=3)
    pages = manager.take(5, leaving=3)
    assert (len(pages), manager.available) == (5, 3)
    assert len(manager.take(3)) == 3


def test_the_pages_to_leave_may_be_cached_ones():
    manager = PageManager(9, SIZE)
    pages = manager.take(8)
    manager.publish([1] * 16, pages)
    manager.drop(pages)
    assert manager.pool.free == 0
    with pytest.raises(NoCapacity):
        manager.take(6, leaving=3)
    assert manager.prefix.evictable == 8  # a refused request evicts nothing
    assert len(manager.take(6, leaving=2)) == 6


def test_published_pages_are_offered_to_the_tier_below():
    manager = PageManager(9, SIZE)
    manager.lower_tier = tier = Tier()
    pages = manager.take(2)
    manager.publish([1, 2, 3, 4], pages)
    assert tier.offered == [[1, 2, 3, 4]]


def test_check_counts_the_trees_pages_and_those_of_the_holders():
    manager = PageManager(9, SIZE)
    pages = manager.take(2)
    manager.publish([1, 2, 3, 4], pages)
    manager.check([pages])
    with pytest.raises(Internal):
        manager.check([])

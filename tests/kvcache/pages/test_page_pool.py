from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.errors import Internal, NoCapacity
from kvcache.pages.page_pool import SCRATCH_PAGE, PagePool
from kvcache.types import PageId


def test_fresh_pages_are_a_run_and_never_the_scratch_page():
    pool = PagePool(9)
    pages = pool.take(8)
    assert pages == list(range(1, 9))
    assert SCRATCH_PAGE not in pages
    pool.check([pages])


def test_a_request_for_too_many_pages_takes_none():
    pool = PagePool(5)
    held = pool.take(3)
    with pytest.raises(NoCapacity):
        pool.take(2)
    assert pool.free == 1
    pool.check([held])


def test_a_request_for_no_pages_gives_none():
    pool = PagePool(3)
    assert pool.take(0) == []
    assert pool.free == pool.total == 2


def test_dropped_pages_come_back_in_ascending_order():
    pool = PagePool(9)
    first, second = pool.take(4), pool.take(4)
    pool.drop(second)
    pool.drop(first)
    again = pool.take(8)
    assert all(b == a + 1 for a, b in pairwise(again))


def test_the_last_holder_frees_a_page():
    pool = PagePool(3)
    pages = pool.take(2)
    pool.share(pages)
    pool.drop(pages)
    assert pool.free == 0
    pool.check([pages])
    pool.drop(pages)
    assert pool.free == 2
    pool.check([])


@pytest.mark.parametrize("change", ["share", "drop"])
def test_an_unheld_page_is_refused(change: str):
    pool = PagePool(3)
    with pytest.raises(Internal):
        getattr(pool, change)([PageId(1)])
    pool.check([])


def test_check_finds_a_lost_page():
    pool = PagePool(4)
    pages = pool.take(2)
    with pytest.raises(Internal, match="miscounted"):
        pool.check([pages[:1]])


def test_check_finds_a_page_with_two_owners():
    pool = PagePool(4)
    pages = pool.take(2)
    with pytest.raises(Internal, match="miscounted"):
        pool.check([pages, pages[:1]])


def test_check_finds_a_holder_of_the_scratch_page():
    pool = PagePool(4)
    with pytest.raises(Internal, match="scratch"):
        pool.check([[SCRATCH_PAGE]])


def test_check_finds_a_broken_free_list():
    pool = PagePool(4)
    pool._free.append(pool._free[0])
    with pytest.raises(Internal, match="free list"):
        pool.check([])


def test_a_page_is_not_freed_while_it_is_read():
    pool = PagePool(4)
    pages = pool.take(2)
    read = threading.Event()
    pool.begin_read(pages[0], read.wait)
    pool.drop(pages[1:])  # nobody waits for another page
    with ThreadPoolExecutor(1) as threads:
        dropping = threads.submit(pool.drop, pages[:1])
        assert not wait([dropping], timeout=0.05).done
        read.set()
        dropping.result(20)
    assert pool.free == 3
    pool.end_read(pages[0])  # it has gone since
    pool.check([])


def test_a_page_that_is_still_held_is_dropped_at_once():
    pool = PagePool(4)
    pages = pool.take(1)
    pool.share(pages)
    pool.begin_read(pages[0], pytest.fail)
    pool.drop(pages)
    pool.check([pages])
    pool.end_read(pages[0])
    pool.drop(pages)
    pool.check([])


def test_a_free_page_is_not_read():
    pool = PagePool(4)
    with pytest.raises(Internal, match="without a holder"):
        pool.begin_read(PageId(1), pytest.fail)


def test_claimed_pages_are_taken_all_or_none():
    pool = PagePool(6)
    assert pool.claim([PageId(4), PageId(2), PageId(4)]) == [2, 4]
    with pytest.raises(Internal, match="held"):
        pool.claim([PageId(3), PageId(4)])
    assert pool.take(3) == [1, 3, 5]
    pool.check([[PageId(2), PageId(4)], [PageId(1), PageId(3), PageId(5)]])


def test_check_finds_a_free_page_that_is_read():
    pool = PagePool(4)
    pages = pool.take(2)
    pool.begin_read(pages[0], pytest.fail)
    pool.check([pages])
    pool._readers[PageId(3)] = pytest.fail
    with pytest.raises(Internal, match="read"):
        pool.check([pages])


def test_check_finds_a_wrong_count_of_evictable_pages():
    pool = PagePool(4)
    pages = pool.take(2)
    pool.set_evictable(pages, True)
    pool.check([pages])
    pool.evictable -= 1
    with pytest.raises(Internal, match="evictable"):
        pool.check([pages])


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "drop"]), st.integers(0, 6))))
def test_any_history_leaves_a_partition(history: list[tuple[str, int]]):
    pool, held = PagePool(8), []
    for what, number in history:
        if what == "take" and number <= pool.free:
            held.append(pool.take(number))
        elif held and what == "share":
            pool.share(held[number % len(held)])
            held.append(held[number % len(held)])
        elif held and what == "drop":
            pool.drop(held.pop(number % len(held)))
        pool.check(held)
    assert pool.free == pool.total - len({page for pages in held for page in pages})


def test_claimed_pages_have_one_holder():
    pool = PagePool(9)
    pages = pool.claim([PageId(5), PageId(2)])
    assert pages == [2, 5]
    pool.check([pages])
    with pytest.raises(Internal):
        pool.claim([PageId(2)])
    pool.drop(pages)
    pool.check([])


def test_check_finds_a_free_page_with_a_reader():
    pool = PagePool(9)
    pages = pool.take(1)
    pool.begin_read(pages[0], lambda: None)
    pool.check([pages])
    readers, pool._readers = pool._readers, {}
    pool.drop(pages)
    pool._readers = readers
    with pytest.raises(Internal, match="being read"):
        pool.check([])

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.errors import Internal
from kvcache.pages.eviction import EvictionPolicy
from kvcache.pages.page_pool import PagePool
from kvcache.pages.prefix_tree import PrefixTree
from kvcache.types import PageId, PageName

SIZE = 2


class Tree:
    """A prefix cache and the pool under it; `keep` inserts pages that only the tree then holds."""

    def __init__(self, pages: int = 32) -> None:
        self.pool = PagePool(pages)
        self.cache = PrefixTree(self.pool, SIZE, EvictionPolicy(pages))

    def keep(self, tokens: Sequence[int]) -> list[PageId]:
        pages = self.pool.take(len(tokens) // SIZE)
        self.cache.insert(tokens, pages)
        self.pool.drop(pages)
        return pages

    def check(self) -> None:
        self.pool.check(self.cache.holders())


@pytest.fixture
def tree() -> Iterator[Tree]:
    tree = Tree()
    yield tree
    tree.check()


def test_an_empty_tree_matches_nothing(tree: Tree):
    assert tree.cache.match([1, 2, 3]) == []
    assert tree.cache.match([]) == []


def test_only_full_pages_match(tree: Tree):
    pages = tree.keep([1, 2, 3, 4])
    assert tree.cache.match([1, 2, 3, 4, 5]) == pages
    assert tree.cache.match([1, 2, 3]) == pages[:1]
    assert tree.cache.match([1]) == []


def test_a_partial_last_page_is_not_kept(tree: Tree):
    pages = tree.pool.take(2)
    tree.cache.insert([1, 2, 3], pages)
    tree.pool.drop(pages)
    assert tree.cache.tokens == 2
    assert tree.cache.match([1, 2, 3, 4]) == pages[:1]


def test_a_match_may_end_within_a_node(tree: Tree):
    pages = tree.keep([1, 2, 3, 4, 5, 6])
    assert tree.cache.match([1, 2, 3, 4, 9, 9]) == pages[:2]


def test_a_page_with_a_common_beginning_does_not_match(tree: Tree):
    tree.keep([1, 2, 3, 4])
    assert tree.cache.match([1, 9, 3, 4]) == []


def test_a_branch_splits_a_node(tree: Tree):
    first = tree.keep([1, 2, 3, 4, 5, 6])
    second = tree.keep([1, 2, 3, 4, 7, 8])
    assert tree.cache.match([1, 2, 3, 4, 5, 6]) == first
    assert tree.cache.match([1, 2, 3, 4, 7, 8]) == [*first[:2], second[2]]
    assert tree.cache.tokens == 8


def test_a_split_keeps_the_nodes_below(tree: Tree):
    first = tree.keep([1, 2, 3, 4])
    below = tree.keep([1, 2, 3, 4, 5, 6])
    tree.keep([1, 2, 9, 9])
    assert tree.cache.match([1, 2, 3, 4, 5, 6]) == [*first, below[2]]


def test_a_duplicate_is_not_kept(tree: Tree):
    first = tree.keep([1, 2, 3, 4])
    free = tree.pool.free
    tree.keep([1, 2, 3, 4])
    tree.keep([1, 2])
    assert tree.pool.free == free
    assert tree.cache.match([1, 2, 3, 4]) == first


def test_large_token_ids_do_not_collide(tree: Tree):
    tree.keep([1 << 20, 1 << 30])
    assert tree.cache.match([0, 1 << 30]) == []
    assert len(tree.cache.match([1 << 20, 1 << 30])) == 1


def test_the_least_recently_used_goes_first(tree: Tree):
    old, new = tree.keep([1, 2]), tree.keep([3, 4])
    assert tree.cache.evict(1) == 1
    assert tree.cache.match([1, 2]) == []
    assert tree.cache.match([3, 4]) == new
    assert old != new


def test_a_match_counts_as_use(tree: Tree):
    used = tree.keep([1, 2])
    tree.keep([3, 4])
    tree.cache.match([1, 2])
    tree.cache.evict(1)
    assert tree.cache.match([1, 2]) == used
    assert tree.cache.match([3, 4]) == []


def test_branches_shrink_from_their_ends(tree: Tree):
    pages = tree.keep([1, 2, 3, 4, 5, 6])
    assert tree.cache.evict(1) == 1
    assert tree.cache.match([1, 2, 3, 4, 5, 6]) == pages[:2]
    assert tree.cache.evict(1) == 1
    assert tree.cache.match([1, 2, 3, 4, 5, 6]) == pages[:1]


def test_an_inner_node_outlives_its_branches(tree: Tree):
    stem = tree.keep([1, 2])
    tree.keep([1, 2, 3, 4])
    tree.keep([1, 2, 5, 6])
    assert tree.cache.evict(2) == 2
    assert tree.cache.match([1, 2, 3, 4]) == stem
    assert tree.cache.evict(9) == 1
    assert tree.cache.tokens == 0
    assert tree.pool.free == tree.pool.total


def test_pages_in_use_survive(tree: Tree):
    pages = tree.keep([1, 2, 3, 4])
    tree.pool.share(pages[:1])
    assert tree.cache.evictable == 1
    assert tree.cache.evict(9) == 1
    assert tree.cache.match([1, 2, 3, 4]) == pages[:1]
    tree.pool.drop(pages[:1])


def test_eviction_stops_at_the_wanted_number(tree: Tree):
    tree.keep([1, 2, 3, 4, 5, 6])
    tree.keep([7, 8])
    assert tree.cache.evict(2) == 2
    assert tree.cache.tokens == 4


def test_an_evicted_branch_can_be_inserted_again(tree: Tree):
    tree.keep([1, 2, 3, 4])
    tree.cache.evict(1)
    again = tree.keep([1, 2, 3, 4])
    assert tree.cache.match([1, 2, 3, 4])[1] == again[1]


def test_a_peek_does_not_count_as_use(tree: Tree):
    tree.keep([1, 2])
    tree.keep([3, 4])
    assert len(tree.cache.match([1, 2], use=False)) == 1
    tree.cache.evict(1)
    assert tree.cache.match([1, 2]) == []
    assert len(tree.cache.match([3, 4])) == 1


def test_pages_that_come_one_by_one_make_one_node(tree: Tree):
    tokens = list(range(8))
    for end in range(SIZE, 8 + SIZE, SIZE):
        tree.keep(tokens[:end])
    assert len(list(tree.cache.holders())) == 1
    assert len(tree.cache.match(tokens)) == 4
    tree.keep([0, 1, 9, 9])  # splits it
    tree.keep([0, 1, 9, 9, 5, 5])
    assert len(list(tree.cache.holders())) == 3
    assert tree.cache.evict(99) == 6


@pytest.mark.parametrize("keep", range(5))
def test_a_cut_takes_all_that_follows(tree: Tree, keep: int):
    tokens = list(range(8))
    tree.keep(tokens)
    tree.keep([*tokens[:6], 9, 9])  # branches off after three pages
    tree.keep([0, 1, 7, 7])  # and after one
    tree.cache.cut(tokens, keep)
    tree.check()
    assert len(tree.cache.match(tokens)) == min(keep, 4)
    assert len(tree.cache.match([*tokens[:6], 9, 9])) == (4 if keep >= 3 else keep)
    assert len(tree.cache.match([0, 1, 7, 7])) == (2 if keep >= 1 else 0)


def test_a_cut_of_uncached_pages_does_nothing(tree: Tree):
    tree.keep([1, 2, 3, 4])
    tree.cache.cut([1, 2, 5, 6], 1)
    tree.cache.cut([7, 8], 0)
    tree.cache.cut([1, 2, 3, 4, 5, 6], 2)
    assert tree.cache.tokens == 4


def test_cuts_leave_nothing_behind(tree: Tree):
    tree.keep([1, 2, 3, 4])
    for _ in range(50):
        tree.keep([5, 6, 7, 8])
        tree.cache.cut([5, 6, 7, 8], 0)
    assert len(tree.cache._leaves) <= 2  # the heap of eviction keeps no removed nodes


def test_a_cut_of_a_leaf_in_use_leaves_nothing_behind(tree: Tree):
    pages = tree.pool.take(2)
    tree.cache.insert([1, 2, 3, 4], pages)
    assert tree.cache.evict(1) == 0  # the leaf waits for its last page
    assert tree.cache._leaves._parked
    tree.cache.cut([1, 2], 0)
    assert not tree.cache._leaves._parked and not tree.pool.awaited
    tree.pool.drop(pages)


@pytest.mark.parametrize("damage", [{"key": b""}, {"pages": []}, {"key": b"", "pages": []}])
def test_a_broken_node_is_found(damage: dict[str, Any]):
    tree = Tree()
    tree.keep([1, 2, 3, 4])
    (node,) = tree.cache._nodes()
    for name, value in damage.items():
        setattr(node, name, value)
    with pytest.raises(Internal, match="node"):
        list(tree.cache.holders())


def readable(before: PageName, page: bytes) -> PageName:
    """A name that shows all tokens up to the page's end."""
    return PageName(before + "".join(f"{token}." for token in np.frombuffer(page, np.int32)))


class Follower:
    """A follower's copy of the tree's names; no change may be reported twice."""

    def __init__(self, tree: Tree) -> None:
        names = tree.cache.follow(readable, self.tell)
        self.known = set(names)
        assert len(self.known) == len(names)

    def tell(self, came: Sequence[PageName], went: Sequence[PageName]) -> None:
        assert not self.known & set(came)
        assert self.known >= set(went)
        self.known = (self.known | set(came)) - set(went)


def test_a_follower_knows_all_cached_pages(tree: Tree):
    tree.keep([1, 2, 3, 4])
    follower = Follower(tree)
    assert follower.known == {"1.2.", "1.2.3.4."}
    tree.keep([1, 2, 5, 6])
    assert follower.known == {"1.2.", "1.2.3.4.", "1.2.5.6."}
    tree.cache.evict(1)
    assert follower.known == {"1.2.", "1.2.5.6."}
    tree.cache.cut([1, 2], 0)
    assert follower.known == set()


def test_only_the_latest_follower_is_told(tree: Tree):
    first = Follower(tree)
    tree.keep([1, 2])
    second = Follower(tree)
    tree.keep([1, 2, 3, 4])
    assert first.known == {"1.2."}
    assert second.known == {"1.2.", "1.2.3.4."}


def test_eviction_does_not_look_at_all_leaves(tree: Tree, monkeypatch: pytest.MonkeyPatch):
    """This counts work, not time: a page costs its leaf, and those used since the last call."""
    leaves, rounds = 2000, 500
    tree = Tree(pages=leaves + 1)
    for number in range(leaves):
        tree.keep([number, number])
    in_use = [tree.cache.match([number, number])[0] for number in range(100)]
    tree.pool.share(in_use)  # they are passed over once
    pops, heappop = 0, heapq.heappop

    def counted(heap: list[tuple[int, int, object]]) -> tuple[int, int, object]:
        nonlocal pops
        pops += 1
        return heappop(heap)

    monkeypatch.setattr(heapq, "heappop", counted)
    monkeypatch.delattr(PrefixTree, "_nodes")  # nothing walks the tree
    for number in range(rounds):
        tree.cache.match([leaves - 1, leaves - 1])  # used all the time, queued once
        assert tree.cache.evictable == leaves - 100 - number
        assert tree.cache.evict(1) == 1
    assert pops <= rounds + 2 * 100 + 1
    tree.pool.drop(in_use)
    assert tree.cache.evict(leaves) == leaves - rounds
    monkeypatch.undo()
    tree.check()


def test_a_leaf_formerly_in_use_is_evicted_by_its_last_use(tree: Tree):
    """A blocked leaf keeps its place in the order, which is that of its last use."""
    first, second, third = (tree.keep([n, n, n, n]) for n in (1, 2, 3))
    tree.pool.share(first)
    assert tree.cache.evict(1) == 1  # of the second
    assert tree.cache.match([2, 2, 2, 2], use=False) == second[:1]
    tree.pool.drop(first)
    assert tree.cache.evict(2) == 2
    assert tree.cache.match([1, 1, 1, 1], use=False) == []
    assert tree.cache.match([3, 3, 3, 3], use=False) == third


def test_a_blocked_leaf_that_grows_or_splits_can_be_evicted(tree: Tree):
    pages = tree.keep([1, 1, 2, 2])
    tree.pool.share(pages)
    assert tree.cache.evict(1) == 0
    tree.keep([1, 1, 2, 2, 3, 3])
    assert tree.cache.evict(9) == 1  # what has grown
    tree.keep([1, 1, 4, 4])  # splits it
    assert tree.cache.evict(9) == 1
    assert tree.pool.awaited == tree.cache._leaves._parked.keys()
    tree.pool.drop(pages)
    assert tree.cache.evict(9) == 2


def test_a_pinned_leaf_that_eviction_has_met_is_evicted_after_its_pin(tree: Tree):
    tree.keep([1, 2])
    tree.cache.pin([1, 2])
    tree.keep([3, 4])
    assert tree.cache.evict(9) == 1
    tree.cache.unpin([1, 2])
    assert tree.cache.evict(9) == 1


OrderEvent = tuple[str, list[int], int]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["keep", "match", "evict", "cut", "hold", "drop", "pin", "unpin"]),
            st.lists(st.integers(0, 1), max_size=9),
            st.integers(0, 4),
        ),
        max_size=40,
    )
)
def test_eviction_order_is_that_of_a_search_through_all_leaves(history: list[OrderEvent]):
    tree = Tree(pages=60)
    held: list[list[PageId]] = []
    for what, tokens, number in history:
        if what == "keep":
            tree.keep(tokens)
        elif what == "match":
            tree.cache.match(tokens)
        elif what == "cut":
            tree.cache.cut(tokens, number)
        elif what == "hold":
            held.append(tree.cache.match(tokens))
            tree.pool.share(held[-1])
        elif what == "drop" and held:
            tree.pool.drop(held.pop(number % len(held)))
        elif what == "pin":
            tree.cache.pin(tokens)
        elif what == "unpin":
            tree.cache.unpin(tokens)
        elif what == "evict":
            wanted = searched(tree, number)
            before = {page for pages in tree.cache.holders() for page in pages}
            assert tree.cache.evict(number) == len(wanted)
            after = {page for pages in tree.cache.holders() for page in pages}
            assert before - after == wanted
        tree.pool.check([*tree.cache.holders(), *held])


def searched(tree: Tree, wanted: int) -> set[PageId]:
    """Return the pages to evict next, by a search for the least recently used leaf."""
    gone: set[PageId] = set()
    while len(gone) < wanted:
        leaves = []
        for node in tree.cache._nodes():
            left = [page for page in node.pages if page not in gone]
            below = [n for n in tree.cache._nodes(node) if not gone >= set(n.pages)]
            if left and not below and tree.pool.can_evict(left[-1]):
                leaves.append((node.used, left[-1]))
        if not leaves:
            break
        gone.add(min(leaves)[1])
    return gone


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["keep", "match", "evict", "cut"]),
            st.lists(st.integers(0, 1), max_size=9),
            st.integers(0, 4),
        ),
        max_size=25,
    ),
    st.integers(0, 25),
)
def test_any_history_agrees_with_a_set_of_prefixes(
    history: list[tuple[str, list[int], int]], followed: int
):
    """The model is the set of cached token prefixes that are whole pages long.

    One follower follows the tree from event `followed` on, and another from two events later.
    """
    tree, known = Tree(pages=200), set()
    follower: Follower | None = None
    for at, (what, tokens, number) in enumerate(history):
        if at in (followed, followed + 2):
            follower = Follower(tree)
        full = len(tokens) // SIZE
        prefixes = [tuple(tokens[: n * SIZE]) for n in range(1, full + 1)]
        if what == "keep":
            tree.keep(tokens)
            known.update(prefixes)
        elif what == "match":
            assert len(tree.cache.match(tokens)) == sum(prefix in known for prefix in prefixes)
        elif what == "cut":
            tree.cache.cut(tokens, number)
            gone = tuple(tokens[: (number + 1) * SIZE])
            if len(gone) == (number + 1) * SIZE:
                known = {prefix for prefix in known if prefix[: len(gone)] != gone}
        else:
            freed = tree.cache.evict(number)
            assert freed == min(number, len(known))
            known = {p for p in known if len(tree.cache.match(p)) * SIZE == len(p)}
        assert tree.cache.tokens == len(known) * SIZE
        assert tree.cache.evictable == len(known)
        if follower is not None:
            assert follower.known == {"".join(f"{t}." for t in prefix) for prefix in known}
        tree.check()


@pytest.mark.parametrize("seed", range(60))
def test_how_many_pages_can_be_evicted_is_known_before(seed: int):
    source, tree, held = random.Random(seed), Tree(), list[PageId]()
    for _ in range(60):
        tokens = [source.randrange(2) for _ in range(SIZE * source.randrange(1, 7))]
        match source.randrange(9):
            case 0 if held:
                tree.pool.drop([held.pop(source.randrange(len(held)))])
            case 1 | 2 if pages := tree.cache.match(tokens):
                page = source.choice(pages[-2:])  # also one that others in the tree continue
                tree.pool.share([page])
                held.append(page)
            case 3:
                tree.cache.evict(source.randrange(1, 4))
            case 4:
                source.choice([tree.cache.pin, tree.cache.unpin])(tokens[: 2 * SIZE])
            case _ if tree.pool.free >= len(tokens) // SIZE:
                tree.keep(tokens)
    count = sum(tree.cache.can_evict(wanted) for wanted in range(1, 32))
    assert not tree.cache.can_evict(count + 1) and tree.cache.can_evict(count)
    assert tree.cache.evict(31) == count

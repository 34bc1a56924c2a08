from __future__ import annotations

import random
from dataclasses import dataclass, field

from kvcache.pages.leaf_queue import LeafQueue
from kvcache.pages.page_pool import PagePool
from kvcache.types import PageId


@dataclass
class Leaf:
    """A leaf that ends with page `last`."""

    used: int
    last: int = 1
    evictable: bool = True
    queued: bool = False
    pages: list[PageId] = field(init=False)

    def __post_init__(self) -> None:
        self.pages = [PageId(self.last)]


def queue(*leaves: Leaf) -> LeafQueue[Leaf]:
    made: LeafQueue[Leaf] = LeafQueue(PagePool(99))
    for leaf in leaves:
        made.add(leaf)
    return made


def popped(leaves: LeafQueue[Leaf]) -> list[int]:
    order = []
    while (leaf := leaves.pop()) is not None:
        order.append(leaf.used)
    return order


def test_leaves_come_by_their_last_use():
    assert popped(queue(Leaf(3), Leaf(1), Leaf(2))) == [1, 2, 3]


def test_a_leaf_is_queued_once():
    leaf = Leaf(1)
    leaves = queue(leaf, leaf)
    assert len(leaves) == 1
    assert leaf.queued
    assert leaves.pop() is leaf
    assert not leaf.queued


def test_a_leaf_that_was_used_since_comes_later():
    leaf = Leaf(1)
    leaves = queue(leaf, Leaf(2))
    leaf.used = 3
    assert popped(leaves) == [2, 3]


def test_a_node_that_is_no_leaf_any_more_is_left_out():
    leaf = Leaf(1)
    leaves = queue(leaf, Leaf(2))
    leaf.evictable = False
    assert popped(leaves) == [2]
    assert not leaf.queued


def test_a_parked_leaf_waits_for_its_page():
    leaves = queue()
    one, two = Leaf(1, last=7), Leaf(2, last=8)
    leaves.park(one)
    leaves.park(two)
    assert leaves._pool.awaited == {7, 8}
    leaves.unpark_any([PageId(8), PageId(9)])
    assert leaves._pool.awaited == {7}
    assert leaves.pop() is two
    leaves._pool.unblocked.append(PageId(7))
    leaves.unpark_released()
    assert not leaves._pool.awaited
    assert not leaves._pool.unblocked
    assert leaves.pop() is one
    assert leaves.pop() is None


def test_pruning_keeps_the_order_of_the_leaves():
    draw = random.Random(1)
    nodes = [Leaf(used) for used in draw.sample(range(200), 100)]
    leaves = queue(*nodes)
    for node in draw.sample(nodes, 60):
        node.evictable = False
    leaves.prune()
    assert len(leaves) == 40
    assert all(node.queued == node.evictable for node in nodes)
    assert popped(leaves) == sorted(node.used for node in nodes if node.evictable)

"""The one order in which the blocks of a context are merged, whoever holds them.

float32 sums depend on their order. So that the attention of a row has the same bits wherever its
keys lie, its absolute blocks of `BLOCK` keys, `[0, 128)`, `[128, 256)`, …, are merged along a fixed
binary tree. Block `i` is a leaf. A node of level `k` stands for blocks `[i·2^k, (i + 1)·2^k)`, and
is its left half merged with its right half; blocks that the row does not reach are left out. The
tree of a longer context contains that of a shorter one.

A holder of all blocks of a node merges them alone and passes on one partial result. So a holder of
`n` neighbouring blocks passes on at most `2·log₂ n` partial results (one, where they are a node),
and not `n`. A left fold, block after block, would need all `n`: only its first run can be merged
elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeVar

__all__ = ["BLOCK", "Node", "fold", "nodes_of", "root"]

BLOCK: Final = 128  # keys

T = TypeVar("T")


class Node(NamedTuple):
    """Blocks `[number·2^level, (number + 1)·2^level)`."""

    level: int
    number: int

    @property
    def first(self) -> int:
        """The first block."""
        return self.number << self.level

    @property
    def end(self) -> int:
        """The block after the last."""
        return (self.number + 1) << self.level

    @property
    def halves(self) -> tuple[Node, Node]:
        """The nodes of which this one is merged; a leaf has none."""
        return Node(self.level - 1, 2 * self.number), Node(self.level - 1, 2 * self.number + 1)


def root(blocks: int) -> Node:
    """Return the smallest node that has the first `blocks` blocks; at least one."""
    return Node(max(blocks - 1, 0).bit_length(), 0)


def nodes_of(blocks: Iterable[int]) -> list[Node]:
    """Return the fewest nodes that have exactly these blocks, in order."""
    nodes: list[Node] = []
    for block in sorted(set(blocks)):
        nodes.append(Node(0, block))
        while len(nodes) > 1 and _are_halves(nodes[-2], nodes[-1]):
            right = nodes.pop()
            nodes[-1] = Node(right.level + 1, right.number // 2)
    return nodes


def fold(node: Node, known: dict[Node, T], merge: Callable[[T, T], T]) -> T | None:
    """Return the result of `node`, merged from the `known` results of nodes in the tree's order.

    Blocks in no known node are left out. None if that leaves nothing.
    """
    if node in known:
        return known[node]
    inner = [other for other in known if node.first <= other.first and other.end <= node.end]
    if node.level == 0 or not inner:
        return None
    below = {other: known[other] for other in inner}
    left, right = (fold(half, below, merge) for half in node.halves)
    if left is None or right is None:
        return right if left is None else left
    return merge(left, right)


def _are_halves(left: Node, right: Node) -> bool:
    return left.level == right.level and left.number % 2 == 0 and right.number == left.number + 1

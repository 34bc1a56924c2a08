"""The tree of blocks: nodes cover their blocks once, and any placement folds alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcache.attention.block_tree import Node, fold, nodes_of, root

blocks = st.sets(st.integers(0, 70))


@given(blocks)
def test_nodes_cover_their_blocks_once_and_are_the_fewest(some: set[int]):
    nodes = nodes_of(some)
    assert [block for node in nodes for block in range(node.first, node.end)] == sorted(some)
    for node in nodes:  # a larger node would have a block that is not there
        parent = Node(node.level + 1, node.number // 2)
        assert not set(range(parent.first, parent.end)) <= some


@given(st.integers(0, 500), st.integers(1, 500))
def test_neighbouring_blocks_are_at_most_two_nodes_per_level(first: int, count: int):
    assert len(nodes_of(range(first, first + count))) <= max(2 * (count.bit_length() - 1), 1)


def test_the_tree_of_five_blocks():
    leaves = {Node(0, block): str(block) for block in range(5)}

    def pair(left: str, right: str) -> str:
        return f"({left}{right})"

    assert root(5) == Node(3, 0)
    assert fold(root(5), leaves, pair) == "(((01)(23))4)"
    assert fold(root(4), dict(list(leaves.items())[:4]), pair) == "((01)(23))"
    without = {node: text for node, text in leaves.items() if node.number != 2}
    assert fold(root(5), without, pair) == "(((01)3)4)"
    assert fold(root(5), {}, pair) is None
    assert (root(0), root(1), root(2)) == (Node(0, 0), Node(0, 0), Node(1, 0))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40))
def test_any_placement_folds_alike(owners: list[int]):
    def pair(left: str, right: str) -> str:
        return f"({left} {right})"

    leaves = {Node(0, block): str(block) for block in range(len(owners))}
    known = {}
    for holder in set(owners):
        held = [block for block, owner in enumerate(owners) if owner == holder]
        for node in nodes_of(held):
            known[node] = fold(node, leaves, pair) or ""
    top = root(len(owners))
    assert fold(top, known, pair) == fold(top, leaves, pair)

"""Made-up prompts: names determine their tokens."""

from __future__ import annotations

import itertools

from engine.protocol import page_names
from router.workload.prompts import (
    hashed_blocks,
    named_tokens,
    prompt_of_blocks,
    spelled_blocks,
    synthetic,
)

PAGE = 16


def test_a_name_determines_its_tokens():
    assert named_tokens("a", 5000) == named_tokens("a", 5000)
    assert named_tokens("a", 5000)[:100] == named_tokens("a", 100)
    assert named_tokens("a", 100) != named_tokens("b", 100)
    assert named_tokens("a", 0) == b""


def test_tokens_are_of_every_vocabulary_and_all_occur():
    assert set(named_tokens("a", 20000)) == set(range(10, 250))


def test_hashed_and_spelled_blocks_depend_on_name_and_seed():
    names = ["0123456789abcdef", "0123456789abcdee", "f123456789abcdef"]
    for make in (hashed_blocks, spelled_blocks):
        made = {(seed, name): make(seed)(name, PAGE) for seed in (0, 1) for name in names}
        assert len(set(made.values())) == len(made)
        assert all(len(tokens) == PAGE for tokens in made.values())
        assert made[0, names[0]] == make(0)(names[0], PAGE)
        assert all(10 <= token < 250 for tokens in made.values() for token in tokens)
        for count in (1, 7, 40):
            assert len(make(0)(names[0], count)) == count


def test_prompts_share_the_blocks_of_the_same_names():
    tokens = hashed_blocks(0)
    first = prompt_of_blocks("ABC", 32, 100, tokens, "one")
    second = prompt_of_blocks("ABD", 32, 90, tokens, "two")
    assert (len(first), len(second)) == (100, 90)
    assert first[:64] == second[:64] and first[64:80] != second[64:80]
    assert len(set(page_names(first, PAGE)) & set(page_names(second, PAGE))) == 4
    assert prompt_of_blocks("ABC", 32, 80, tokens, "x") == first[:80]  # the last block is cut
    assert prompt_of_blocks("", 32, 3, tokens, "x") == list(named_tokens("x", 3))


def test_blocks_of_a_broken_size_begin_at_the_nearest_token():
    tokens = hashed_blocks(0)
    whole = prompt_of_blocks("ABCD", 2.5, 10, tokens, "rest")
    sizes = [2, 3, 3, 2]  # ends at 2.5, 5, 7.5 and 10, rounded to even
    assert whole == [
        token for name, size in zip("ABCD", sizes, strict=True) for token in tokens(name, size)
    ]


def test_synthetic_prompts_have_their_lengths_and_share_nothing():
    requests = list(synthetic("w", iter([40, 50, 60]), itertools.repeat(9)))
    assert [request.input_tokens for request in requests] == [40, 50, 60]
    assert [len(request.body["prompt"]) for request in requests] == [40, 50, 60]
    assert {request.body["max_tokens"] for request in requests} == {9}
    pages = [page_names(request.body["prompt"], PAGE) for request in requests]
    assert len(set(itertools.chain(*pages))) == sum(map(len, pages)) == 2 + 3 + 3

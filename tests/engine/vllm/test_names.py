"""The names of cached pages, as the lead knows them."""

from __future__ import annotations

from engine.protocol import page_name
from engine.vllm.names import CachedNames
from kvcache.types import PageName


def names(*texts: str) -> list[PageName]:
    return [PageName(text) for text in texts]


def test_a_follower_gets_what_is_there_and_then_what_changes():
    cached, told = CachedNames(), []
    cached.change(names("a", "b"), [])
    there = cached.follow_prefixes(page_name, lambda added, removed: told.append((added, removed)))
    cached.change(names("c"), names("a"))
    assert list(there) == ["a", "b"]
    assert told == [(["c"], ["a"])]
    assert len(cached) == 2


def test_what_is_known_or_unknown_already_is_not_told():
    cached, told = CachedNames(), []
    cached.change(names("a"), [])
    cached.follow_prefixes(page_name, lambda added, removed: told.append((added, removed)))
    cached.change(names("a"), names("x"))
    assert told == []

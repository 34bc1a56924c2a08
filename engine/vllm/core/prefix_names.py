"""Names of cached pages, from vLLM's events about its blocks."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from engine.protocol import PageName, page_name

__all__ = ["PrefixNames"]


class PrefixNames:
    """The pages of a prefix cache by their names (`engine.protocol.names`).

    vLLM knows them by hashes of its own, and may hold a page twice. A page is cached while one of
    its blocks is.
    """

    def __init__(self) -> None:
        self._names: dict[Any, PageName] = {}  # by vLLM's hash of the block
        self._blocks: Counter[Any] = Counter()  # by the same

    def update(self, events: Iterable[Any]) -> tuple[list[str], list[str]]:
        """Apply events; return the names that were added and those that were removed, in order."""
        added: dict[str, None] = {}
        removed: dict[str, None] = {}
        for event in events:
            if isinstance(event, BlockStored):
                for name in self._stored(event):
                    added[name] = None
                    removed.pop(name, None)
            elif isinstance(event, BlockRemoved | AllBlocksCleared):
                for name in self._removed(event):
                    if name in added:
                        del added[name]
                    else:
                        removed[name] = None
        return list(added), list(removed)

    def _stored(self, event: Any) -> Iterable[PageName]:
        name = PageName("")
        if event.parent_block_hash is not None:
            if event.parent_block_hash not in self._names:
                return  # a page whose prefix is unknown has no name
            name = self._names[event.parent_block_hash]
        tokens, size = array("i", event.token_ids), event.block_size
        for index, hash_ in enumerate(event.block_hashes):
            name = page_name(name, tokens[index * size : (index + 1) * size].tobytes())
            self._blocks[hash_] += 1
            if hash_ not in self._names:
                self._names[hash_] = name
                yield name

    def _removed(self, event: Any) -> Iterable[PageName]:
        hashes = list(self._names) if isinstance(event, AllBlocksCleared) else event.block_hashes
        for hash_ in hashes:
            self._blocks[hash_] -= 1
            if self._blocks[hash_] <= 0 or isinstance(event, AllBlocksCleared):
                del self._blocks[hash_]
                name = self._names.pop(hash_, None)
                if name is not None:
                    yield name

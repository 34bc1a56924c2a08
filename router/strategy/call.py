"""A strategy that runs for a request: the router has called it, or another strategy."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable

from router.base import Chunk
from router.strategy.cluster import Cluster, OpenCall

__all__ = ["StrategyCall"]


class StrategyCall(AsyncIterator[Chunk]):
    """The chunks of a strategy. `aclose` ends it before its end.

    It closes the calls of other strategies that it has made and that still run, as if their bodies
    stood in its own. asyncio never finalises it: that would be later, and in a task of nobody.
    """

    __slots__ = ("_begun", "_caller", "_chunks", "_cluster", "_name")

    def __init__(
        self, name: str, chunks: AsyncGenerator[Chunk, None], cluster: Cluster, caller: Cluster
    ) -> None:
        """`cluster` is what its body sees, `caller` what the body sees that has called it."""
        self._name = name
        self._chunks = chunks
        self._cluster = cluster
        self._caller = caller
        self._begun = False

    async def __anext__(self) -> Chunk:
        if self._begun:
            step: Awaitable[Chunk] = anext(self._chunks)
        else:
            self._begun = True
            self._caller._calls.append(self)
            if self._caller._within:
                self._caller._attempt.delegated(self._name)
            step = _first(self._chunks)
        try:
            return await step
        except BaseException:
            self._forget_if_ended()
            raise

    async def aclose(self) -> None:
        """End it, after the calls that it has made; the latest one ends first. Idempotent.

        A call that a task of its own waits for is left to that task.
        """
        left = [call for call in self._cluster._calls if not call.running]
        try:
            await _close([self._chunks, *left])
        finally:
            self._forget_if_ended()

    @property
    def running(self) -> bool:
        """Whether a task waits for its next chunk."""
        return getattr(self._chunks, "ag_running", True)

    @property
    def left_open(self) -> bool:
        """Whether it has called others that have not ended."""
        return bool(self._cluster._calls)

    @property
    def innermost(self) -> AsyncGenerator[Chunk, None]:
        """The body that is waiting now: its own, or that of a call that it waits for."""
        for call in reversed(self._cluster._calls):
            if call.running:
                return call.innermost
        return self._chunks

    def _forget_if_ended(self) -> None:
        if getattr(self._chunks, "ag_frame", None) is None and self in self._caller._calls:
            self._caller._calls.remove(self)


async def _close(calls: list[AsyncGenerator[Chunk, None] | OpenCall]) -> None:
    """Close all, the last one first, whatever they raise."""
    try:
        await calls.pop().aclose()
    finally:
        if calls:
            await _close(calls)


def _first(chunks: AsyncGenerator[Chunk, None]) -> Awaitable[Chunk]:
    """Begin the first step without asyncio's hooks: a call is closed by its caller."""
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        return anext(chunks)
    finally:
        sys.set_asyncgen_hooks(*hooks)

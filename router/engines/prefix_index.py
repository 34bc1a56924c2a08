"""What each engine has cached of prompts: the router's own view of all prefix trees (MS7).

    engine ── names that come and go ──► View.known ─────┐
    legs that compute or receive a prompt ──► .expected ─┴─► how much of a request is cached there

A page is known by a name that says all tokens up to its end, so what is known of an engine is a set
of names, and a prefix is found by bisection: who has a page has all before it. An engine's stream
is right to the beat; what is not there yet but under way counts too, so that requests with a common
prefix that come at once find each other.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from types import TracebackType

from engine.protocol import Internal, MicroserveError, PageName
from router.base.request import Request
from router.engines.backend import Backend, guard

__all__ = ["NOTHING", "Expected", "PrefixIndex"]

log = logging.getLogger(__name__)

RETRY_S = 0.2  # after the loss of a stream
UNASKED = 1000  # after so many legs without a question, engines are followed no longer
# What has landed is counted as expected until the engine has certainly said so itself.
LINGER_S = 1.0


class Expected:
    """A prompt on its way into an engine's prefix cache, until it has landed or will not come.

    As a context: it will not come any more when the body is left.
    """

    __slots__ = ("_counts", "_landed", "_names")

    def __init__(self, counts: Counter[PageName], names: Sequence[PageName]) -> None:
        self._counts = counts
        self._names = names
        self._landed = False
        counts.update(names)

    def landed(self) -> None:
        """It is cached there now, and the engine will say so in a moment. Idempotent."""
        if self._names and not self._landed:
            asyncio.get_running_loop().call_later(LINGER_S, self._forget)
        self._landed = True

    def end(self) -> None:
        """What has not landed will not. Idempotent."""
        if not self._landed:
            self._forget()

    def __enter__(self) -> Expected:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def _forget(self) -> None:
        counts, names, self._names = self._counts, self._names, ()
        for name in names:
            if counts[name] > 1:
                counts[name] -= 1
            else:
                del counts[name]


class _View:
    """What is known of one engine."""

    __slots__ = ("expected", "follower", "known", "there")

    def __init__(self) -> None:
        self.known: set[PageName] = set()
        self.expected: Counter[PageName] = Counter()
        self.there = asyncio.Event()  # set: the engine has said what it has
        self.follower: asyncio.Task[None] | None = None

    def lose(self) -> None:
        """Nothing is known any more: the engine may be another process."""
        self.known = set()
        self.expected = Counter()  # those under way keep the old one
        self.there.clear()

    def lacks(self, name: PageName) -> bool:
        return name not in self.known and name not in self.expected

    def lacks_now(self, name: PageName) -> bool:
        return name not in self.known


class PrefixIndex:
    """The views of all engines that were asked about. Costs nothing until then, nor when strategies
    ask no longer; how long ago the last one asked is no matter, for sessions are slow."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        """`tasks` is the parent of the tasks that read what engines say; `close` ends them."""
        self._tasks = tasks
        self._views: dict[Backend, _View] = {}
        self._unasked = 0  # legs since the last question

    def cached(self, backend: Backend, request: Request, end: int, *, coming: bool = True) -> int:
        """How many of `tokens[:end]` are there: in full pages, cached or, with `coming`, on their
        way. 0 as long as the engine has not said what it has; see `known`."""
        view = self._follow(backend)
        lacks = view.lacks if coming else view.lacks_now
        names = _names(backend, request, end)
        if not names or lacks(names[0]):
            return 0
        return bisect_left(names, True, key=lacks) * _page_size(backend)

    def expect(self, backend: Backend, request: Request, end: int) -> Expected:
        """From now on, the full pages of `tokens[:end]` are on their way into the cache there."""
        view = self._views.get(backend)
        if view is None:
            return NOTHING
        self._unasked += 1
        if self._unasked > UNASKED:
            self.close()
            return NOTHING
        return Expected(view.expected, _names(backend, request, end))

    async def known(self, backend: Backend) -> None:
        """Wait until the engine has said what it has cached."""
        await self._follow(backend).there.wait()

    def forget(self, backend: Backend) -> None:
        """Follow an engine no longer."""
        view = self._views.pop(backend, None)
        if view is not None and view.follower is not None:
            view.follower.cancel()

    def close(self) -> None:
        """Follow none any longer."""
        for backend in list(self._views):
            self.forget(backend)

    def _follow(self, backend: Backend) -> _View:
        self._unasked = 0
        view = self._views.get(backend)
        if view is None:
            view = self._views[backend] = _View()
            name = f"prefixes of {backend.url}"
            view.follower = self._tasks.create_task(_keep_up(backend, view), name=name)
        return view


async def _keep_up(backend: Backend, view: _View) -> None:
    """Read what the engine says, for ever; forget all of it whenever it is lost."""
    while True:
        try:
            await guard(_read(backend, view), backend)
        except MicroserveError as error:
            log.info("what engine %s has cached is not known: %s", backend.id, error)
        finally:
            view.lose()
        await asyncio.sleep(RETRY_S)


async def _read(backend: Backend, view: _View) -> None:
    async with aclosing(backend.client.prefixes()) as changes:
        async for change in changes:
            view.known.difference_update(change.removed)
            view.known.update(change.added)
            view.there.set()


def _names(backend: Backend, request: Request, end: int) -> list[PageName]:
    """Of the full pages of `tokens[:end]`."""
    size = _page_size(backend)
    return request.page_names(size)[: end // size]


def _page_size(backend: Backend) -> int:
    if backend.model is None:
        raise Internal(f"engine {backend.id} is used before it is known")
    return backend.model.page_size


NOTHING = Expected(Counter(), ())

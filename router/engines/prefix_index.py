"""Which prefixes each engine has cached: the router's own view of all prefix trees.

    engine ── names added, removed ────► View.known ─────┐
    legs that compute or receive a prompt ──► .expected ─┴─► how much of a request is cached there

A page's name determines all tokens up to the page's end. So an engine's cache is a set of names,
and the longest cached prefix is found by bisection: an engine that has a page has all pages before
it. Pages that are still being computed or received count too, so that simultaneous requests with a
common prefix go to the same engine.
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
from router.base import Pauses, Request
from router.engines.backend import Backend, guard

__all__ = ["NOTHING", "Expected", "PrefixIndex"]

log = logging.getLogger(__name__)

RETRY_S, LONGEST_RETRY_S = 0.2, 30.0  # pauses after the loss of a stream
STEADY_S = 10.0  # after a stream that lasted this long, the first pause is short again
MOST_PAGES = 1 << 20  # pages of one engine, whatever it says
UNUSED_LEGS = 1000  # after this many legs without a query, no engine is followed any longer
# Landed pages stay expected this long; by then the engine has reported them.
LINGER_S = 1.0


class Expected:
    """Pages on their way into an engine's prefix cache.

    As a context manager it ends when the body is left: pages that have not landed will not.
    """

    __slots__ = ("_counts", "_landed", "_names")

    def __init__(self, counts: Counter[PageName], names: Sequence[PageName]) -> None:
        self._counts = counts
        self._names = names
        self._landed = False
        counts.update(names)

    def landed(self) -> None:
        """Note that the pages are cached; the engine will report them soon. Idempotent."""
        if self._names and not self._landed:
            asyncio.get_running_loop().call_later(LINGER_S, self._forget)
        self._landed = True

    def end(self) -> None:
        """Note that pages that have not landed will not. Idempotent."""
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
    """The known pages of one engine."""

    __slots__ = ("expected", "follower", "known", "ready")

    def __init__(self) -> None:
        self.known: set[PageName] = set()
        self.expected: Counter[PageName] = Counter()
        self.ready = asyncio.Event()  # set: the engine has reported what it has
        self.follower: asyncio.Task[None] | None = None

    def lose(self) -> None:
        """Forget all: the engine may be another process now."""
        self.known = set()
        self.expected = Counter()  # pending `Expected`s keep the old one
        self.ready.clear()

    def lacks(self, name: PageName) -> bool:
        return name not in self.known and name not in self.expected

    def lacks_now(self, name: PageName) -> bool:
        return name not in self.known


class PrefixIndex:
    """The views of all engines that were queried.

    Engines are followed from the first query on, and until no strategy queries any more. That is
    measured in legs, not in time: sessions may be slow.
    """

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        """`tasks` is the parent of the tasks that follow the engines; `close` ends them."""
        self._tasks = tasks
        self._views: dict[Backend, _View] = {}
        self._unused_legs = 0  # legs since the last query

    def cached(self, backend: Backend, request: Request, end: int, *, coming: bool = True) -> int:
        """Return how many of `tokens[:end]` are cached there, in full pages.

        With `coming`, pages on their way count too. 0 until the engine has reported what it has
        (see `known`), and for one that never does.
        """
        if not backend.can("prefixes"):
            return 0
        view = self._follow(backend)
        lacks = view.lacks if coming else view.lacks_now
        names = _names(backend, request, end)
        if not names or lacks(names[0]):
            return 0
        return bisect_left(names, True, key=lacks) * backend.page_size

    def expect(self, backend: Backend, request: Request, end: int) -> Expected:
        """Note that the full pages of `tokens[:end]` are on their way into the cache there."""
        view = self._views.get(backend)
        if view is None:
            return NOTHING
        self._unused_legs += 1
        if self._unused_legs > UNUSED_LEGS:
            self.close()
            return NOTHING
        return Expected(view.expected, _names(backend, request, end))

    async def known(self, backend: Backend) -> None:
        """Wait until the engine has reported what it has cached.

        Raises `Unsupported` if it never does.
        """
        backend.require("prefixes")
        await self._follow(backend).ready.wait()

    def forget(self, backend: Backend) -> None:
        """Stop following an engine."""
        view = self._views.pop(backend, None)
        if view is not None and view.follower is not None:
            view.follower.cancel()

    def close(self) -> None:
        """Stop following all engines."""
        for backend in list(self._views):
            self.forget(backend)

    def _follow(self, backend: Backend) -> _View:
        self._unused_legs = 0
        view = self._views.get(backend)
        if view is None:
            view = self._views[backend] = _View()
            name = f"prefixes of {backend.url}"
            view.follower = self._tasks.create_task(_keep_up(backend, view), name=name)
        return view


async def _keep_up(backend: Backend, view: _View) -> None:
    """Follow the engine's changes, without end; forget all whenever the stream is lost."""
    clock, pauses = asyncio.get_running_loop().time, Pauses(RETRY_S, LONGEST_RETRY_S)
    while True:
        if not backend.can("prefixes"):  # another process than the one that was asked about
            await asyncio.sleep(RETRY_S)
            continue
        began = clock()
        try:
            await guard(_read(backend, view), backend, endless=True)
        except MicroserveError as error:
            log.info("the prefix cache of engine %s is not known: %s", backend.id, error)
        except Exception:  # concerns this engine's prefixes only; the router must go on
            log.exception("the prefix cache of engine %s could not be read", backend.id)
        finally:
            view.lose()
        if clock() - began > STEADY_S:
            pauses.reset()
        # While the engine is down, a try costs nothing.
        await asyncio.sleep(pauses.next() if backend.status == "up" else RETRY_S)


async def _read(backend: Backend, view: _View) -> None:
    async with aclosing(backend.client.prefixes()) as changes:
        async for change in changes:
            view.known.difference_update(change.removed)
            view.known.update(change.added)
            if len(view.known) > (most := _most_pages(backend)):
                raise Internal(f"it reports more cached pages than its {most} pages")
            if not change.more:
                view.ready.set()


def _most_pages(backend: Backend) -> int:
    """Return how many pages the engine can have cached: those of its pool and its tiers."""
    state = backend.state
    pages = state.pages.total + sum(tier.total for tier in state.tiers) if state else 0
    return min(pages, MOST_PAGES) or MOST_PAGES


def _names(backend: Backend, request: Request, end: int) -> list[PageName]:
    """Return the names of the full pages of `tokens[:end]`."""
    size = backend.page_size
    return request.page_names(size)[: end // size]


NOTHING = Expected(Counter(), ())

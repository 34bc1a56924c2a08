"""Blocks of pages that other virtual engines lend: a debtor on the virtual event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from engine.borrowing import BorrowingSettings, Debtor
from engine.virtual.loans.calls import VirtualLoanCalls
from engine.virtual.loans.links import VirtualLinks
from kvcache.lease import Identity

__all__ = ["AtOnce", "VirtualBorrowing"]


class VirtualBorrowing(Debtor):
    """What `engine.service.borrowing.Borrowing` is on a thread of its own."""

    def __init__(
        self,
        identity: Identity,
        calls: VirtualLoanCalls,
        links: VirtualLinks,
        before: Callable[[], object],
        *,
        page_size: int,
        settings: BorrowingSettings,
    ) -> None:
        """`before` is called before blocks come or are lost: the step under way ends before that.

        Raises `BadRequest` for a page size that does not divide a block.
        """
        loop = asyncio.get_running_loop()
        super().__init__(identity, calls, links, loop.time, page_size=page_size, settings=settings)
        self._before, self._calls = before, calls
        self._task = loop.create_task(self._keeper.run())

    def die(self) -> None:
        """Keep nothing further, and tell nobody: the engine has died."""
        self._calls.die()
        self._task.cancel()

    def _on_loop(self, do: Callable[[], object]) -> bool:
        do()
        return True

    def _tell(self, tell: Callable[..., object], *what: object) -> None:
        self._before()
        tell(*what)


class AtOnce(Executor):
    """Runs what it is given at once: nothing blocks in virtual time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  whoever awaits the future gets it
            done.set_exception(error)
        return done

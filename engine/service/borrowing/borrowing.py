"""Blocks of pages that other engines lend: the keeper of their accounts on a thread."""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from engine.borrowing import BorrowingSettings, Debtor
from engine.service.borrowing.calls import CreditorCalls
from engine.service.borrowing.links import ThreadedLinks
from kvcache.lease import Identity
from kvcache.remote_attention import RemoteAttention

__all__ = ["Borrowing"]

log = logging.getLogger(__name__)

CLOSE_S = 3.0


class Borrowing(Debtor):
    """A debtor with a thread of its own, which asks for loans, renews these, and gives them back.

    No method waits for a creditor, but for `close`. The callbacks run on that thread.
    """

    def __init__(
        self,
        identity: Identity,
        remote: RemoteAttention,
        *,
        page_size: int,
        api_key: str = "",
        tls: ssl.SSLContext | None = None,
        settings: BorrowingSettings | None = None,
    ) -> None:
        """Start the thread.

        `identity` is this engine's. `remote` ships queries to creditors; this object connects and
        closes it. `api_key` is common to all engines; `tls` verifies those with https URLs. Raises
        `BadRequest` for a page size that does not divide a block.
        """
        super().__init__(
            identity,
            CreditorCalls(api_key, tls),
            ThreadedLinks(remote),
            time.monotonic,
            page_size=page_size,
            settings=settings or BorrowingSettings(),
        )
        self._remote = remote
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="borrowing", daemon=True)
        self._thread.start()
        self._started.wait()

    def close(self) -> None:
        """Give everything back, and end the thread. Waits for some seconds at most. Idempotent."""
        if self._thread.is_alive():
            self._on_loop(self._cancel)
            self._thread.join(CLOSE_S)
        self._remote.close()

    # The thread

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            try:
                runner.run(self._keep())
            except asyncio.CancelledError:
                pass
            except Exception:
                log.exception("this engine borrows no longer")
            finally:
                self._started.set()

    async def _keep(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._started.set()
        await self._keeper.run()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _on_loop(self, do: Callable[[], object]) -> bool:
        """Have the thread call `do`; return False if it has ended."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(do)
                return True
        return False

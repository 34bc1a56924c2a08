"""A progress bar on standard error, for what takes longer than a second, and what signals do."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Bar", "cleared_on_sigterm", "on_signal", "progress"]

CLEAR = b"\r\x1b[2K\x1b[?25h"  # the line; and shows the cursor
Handler = Callable[[int, FrameType | None], object] | int
SHOW_AFTER_S, SHOW_EVERY_S = 1.0, 0.1


class Bar:
    """Shows how many of `total` steps are done. It looks at the clock every `look_every` steps."""

    def __init__(self, total: int, what: str, look_every: int) -> None:
        self._total = total
        self._what = what
        self._look_every = look_every
        self._done = 0
        self._shown = time.monotonic() - SHOW_EVERY_S + SHOW_AFTER_S
        self._progress: Progress | None = None

    def step(self) -> None:
        """Note that a step has ended."""
        self._done += 1
        if self._done % self._look_every == 0 and time.monotonic() - self._shown > SHOW_EVERY_S:
            self._show()

    def close(self) -> None:
        """Remove the bar."""
        if self._progress is not None:
            self._progress.stop()

    def _show(self) -> None:
        if self._progress is None:
            columns = (
                TextColumn(f"{{task.completed}} of {{task.total}} {self._what}"),
                BarColumn(),
            )
            self._progress = Progress(
                *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True,
                auto_refresh=False,
            )  # fmt: skip
            self._progress.add_task("", total=self._total)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=self._done, refresh=True)
        self._shown = time.monotonic()


@contextmanager
def progress(total: int, what: str, *, look_every: int = 1) -> Iterator[Bar]:
    """Show a bar while the context is open."""
    bar = Bar(total, what, look_every)
    with cleared_on_sigterm():
        try:
            yield bar
        finally:
            bar.close()


@contextmanager
def on_signal(number: int, handler: Handler) -> Iterator[None]:
    """Handle a signal while the context is open. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def cleared_on_sigterm() -> Iterator[None]:
    """Clear the line of a progress bar, and show the cursor, before SIGTERM ends this process."""

    def end(number: int, _: FrameType | None) -> None:
        if sys.stderr.isatty():
            os.write(2, CLEAR)  # not by rich, which may be in the middle of its own output
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    with on_signal(signal.SIGTERM, end):
        yield

"""What commands do when a signal ends them."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["cleared_on_sigterm", "on_signal"]

CLEAR = b"\r\x1b[2K\x1b[?25h"
Handler = Callable[[int, FrameType | None], object] | int


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

"""What strategies do that they must not, by name."""

from __future__ import annotations

from typing import Literal

__all__ = ["Kind"]

Kind = Literal[
    "raised",  # an error that no engine made
    "no_chunk",  # yielded something else
    "went_on",  # yielded after the stream's end
    "ended_early",  # returned before the stream's end
    "stalled",  # waited for something, and no engine was working for it
    "ignored_cancellation",  # swallowed it, yielded after it, or did not end in time
    "cleanup",  # failed, or yielded, when it was to end
    "left_tasks",  # started tasks and did not end them
    "blocked",  # held up the event loop: the one violation that harms others
]

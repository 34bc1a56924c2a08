"""The rules that strategies can break, by name."""

from __future__ import annotations

from typing import Literal

__all__ = ["ViolationKind"]

ViolationKind = Literal[
    "raised",  # an error of its own, not an engine's
    "overlap",  # made a call that an earlier one of its own excludes
    "no_chunk",  # yielded something other than a Chunk
    "went_on",  # yielded after the stream's end
    "ended_early",  # returned before the stream's end
    "stalled",  # waited while no engine was working for it
    "ignored_cancellation",  # swallowed it, yielded after it, or did not end in time
    "cleanup",  # failed or yielded in its cleanup
    "left_tasks",  # started tasks and did not end them
    "blocked",  # blocked the event loop: the one violation that harms other requests
]

"""The stages of a pipeline: batches pass them one after the other, in the order of entry."""

from __future__ import annotations

__all__ = ["Stages"]


class Stages:
    """Stages that serve one batch at a time each. A batch takes as long in each of them.

    When stage k has served what entered so far is `max(v + k·s)` over some of the batches, where a
    batch that takes `s` in a stage left the first one at `v`, and later batches have pushed `v` on:
    a batch that is faster than one before it is held up by it from some stage on. A batch of `s`
    seconds moves the lines of slower batches by `s`, and takes the place of all others. So a batch
    takes constant time on average, however many stages there are.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.free_s = 0.0  # from when on the first stage takes another batch
        # Seconds in a stage and the time at the last stage, less `_moved`. Both fall.
        self._lines: list[tuple[float, float]] = []
        self._moved = 0.0

    def enter(self, ready_s: float, seconds: float, extra_s: float = 0.0) -> float:
        """Send a batch through, and return when the last stage has served it.

        It takes `seconds` in each stage, and `extra_s` more in the first one.
        """
        first = max(ready_s, self.free_s) + seconds + extra_s
        last = first + (self.count - 1) * seconds
        self.free_s = first
        lines, moved = self._lines, self._moved + seconds
        while lines and (lines[-1][0] <= seconds or lines[-1][1] + moved <= last):
            lines.pop()
        if not lines:
            self._moved = 0.0
            lines.append((seconds, last))
            return last
        self._moved = moved
        lines.append((seconds, last - moved))
        return lines[0][1] + moved

"""Traces: requests that once arrived somewhere, with their times."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.protocol import BadRequest
from router.workload.arrivals import replayed
from router.workload.files import bad_line, numbered_lines
from router.workload.prompts import prompt_of_blocks
from router.workload.request import MOST_TOKENS, LoadRequest, timed
from router.workload.trace_formats import Entry, Format

__all__ = ["Trace"]

Entries = Iterator[tuple[int, Entry]]  # with the numbers of their lines


@dataclass(frozen=True, slots=True)
class Trace:
    """A file of requests in one of the formats. All its lines have been checked once."""

    path: Path
    format: Format
    count: int  # requests
    seconds: float  # from the first request to the last
    longest: int  # prompt or answer (tokens)

    @classmethod
    def read(cls, path: Path, format: Format) -> Trace:
        """Check all lines. Raises `BadRequest`, naming the line."""
        count, first, last, longest = 0, 0.0, 0.0, 1
        for number, entry in _entries(path, format):
            if not count:
                first = last = entry.at_s
            if entry.at_s < last:
                raise bad_line(path, number, "its time is before the one of the line before it")
            count, last = count + 1, entry.at_s
            longest = max(longest, entry.input_tokens, entry.output_tokens)
        if not count:
            raise BadRequest(f"{path}: a trace without requests")
        return cls(path, format, count, last - first, longest)

    def requests(
        self, seed: int, *, speed: float = 1.0, scale: float = 1.0
    ) -> Iterator[LoadRequest]:
        """Yield the requests, from time 0 on, reading the file as they are taken.

        Arrivals are `speed` times as fast. `scale` is a factor for all lengths, including those of
        shared beginnings; a length is never below one token. Raises `BadRequest`.
        """
        if self.longest * scale > MOST_TOKENS:
            raise BadRequest(
                f"{self.path}: {self.longest} tokens times {scale:g} are over {MOST_TOKENS}"
            )
        entries, same = itertools.tee(_entries(self.path, self.format))
        times = replayed((entry.at_s for _, entry in same), speed)
        return timed(self._untimed(entries, seed, scale), times)

    def _untimed(self, entries: Entries, seed: int, scale: float) -> Iterator[LoadRequest]:
        tokens, block_tokens = self.format.tokens(seed), self.format.block_tokens * scale
        for number, entry in entries:
            length = max(1, round(entry.input_tokens * scale))
            rest = f"{self.format.name} {seed} line {number}"
            prompt = prompt_of_blocks(entry.blocks, block_tokens, length, tokens, rest)
            body = {"prompt": prompt, "max_tokens": max(1, round(entry.output_tokens * scale))}
            yield LoadRequest(body, length, None, entry.session, entry.strategy)


def _entries(path: Path, format: Format) -> Entries:
    lines = numbered_lines(path)
    if format.has_header:
        next(lines, None)
    for number, line in lines:
        try:
            yield number, format.parse(line)
        except (ValueError, RecursionError) as error:
            raise bad_line(path, number, f"no line of the format {format.name}: {error}") from None

"""A strategy's source that is refused, and the place in it that is at fault."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from types import TracebackType

from engine.protocol import BadRequest

__all__ = ["Place", "SourceError", "place_of"]

LINE_ENDS = re.compile(r"\r\n|\r|\n")  # as Python counts lines; str.splitlines knows more of them


@dataclass(frozen=True, slots=True)
class Place:
    """A range of a source. Lines and columns count from 1, columns in characters.

    The end is exclusive. `None`: unknown; a line that is known may have no columns.
    """

    line: int | None = None
    column: int | None = None
    end_line: int | None = None
    end_column: int | None = None


class SourceError(BadRequest):
    """The source cannot be loaded. `kind` is `syntax`, or `load` for an error while it runs."""

    def __init__(self, message: str, *, kind: str = "load", place: Place | None = None) -> None:
        super().__init__(message, param="source")
        self.kind = kind
        self.place = place or Place()


def place_of(error: BaseException, source: str, where: str) -> Place:
    """Return the innermost place that an error has passed in `source`, compiled as `where`."""
    found = Place()
    if isinstance(error, SyntaxError) and error.filename == where:
        found = _of_syntax(error)
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == where:
            found = _of_frame(traceback, source)
        traceback = traceback.tb_next
    return found


def _of_syntax(error: SyntaxError) -> Place:
    """Zero or less means unknown."""
    line, column, end_line, end_column = (
        number if number is not None and number > 0 else None
        for number in (error.lineno, error.offset, error.end_lineno, error.end_offset)
    )
    if line is None or column is None:
        return Place(line)
    if end_line is None or end_column is None or (end_line, end_column) <= (line, column):
        return Place(line, column)
    return Place(line, column, end_line, end_column)


def _of_frame(traceback: TracebackType, source: str) -> Place:
    code, at = traceback.tb_frame.f_code, traceback.tb_lasti // 2
    positions = next(islice(code.co_positions(), at, at + 1), None)
    if positions is None or None in positions:
        return Place(traceback.tb_lineno)
    line, end_line, begin, end = (number or 0 for number in positions)
    lines = LINE_ENDS.split(source)
    return Place(line, _column(lines, line, begin), end_line, _column(lines, end_line, end))


def _column(lines: list[str], line: int, offset: int) -> int | None:
    """Return the column of an offset in bytes of UTF-8."""
    if not 0 < line <= len(lines):
        return None
    return 1 + len(lines[line - 1].encode("utf-8", "replace")[:offset].decode(errors="ignore"))

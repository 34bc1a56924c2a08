"""Lines of files of users."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.protocol import BadRequest

__all__ = ["bad_line", "numbered_lines"]

BOM = b"\xef\xbb\xbf"


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers from 1. Raises `BadRequest`."""
    number = 0
    try:
        with path.open("rb") as file:  # decoded line by line, to know the line with the error
            for number, data in enumerate(file, start=1):
                if line := data.removeprefix(BOM).decode().strip():
                    yield number, line
    except OSError as error:
        raise BadRequest(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise bad_line(path, number, "no UTF-8 text") from None


def bad_line(path: Path, number: int, problem: object) -> BadRequest:
    """Return the error of a line."""
    return BadRequest(f"{path}:{number}: {problem}")

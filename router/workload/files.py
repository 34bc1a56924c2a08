"""Lines of files of users."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.protocol import BadRequest

__all__ = ["bad_line", "numbered_lines"]

MOST_BYTES = 1 << 26  # of a line
BOM = b"\xef\xbb\xbf"


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers from 1.

    Raises `BadRequest`, also for a pipe or a device: workloads are read more than once.
    """
    number = 0
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise BadRequest(f"{path}: no regular file, and a workload is read more than once")
        with path.open("rb") as file:  # decoded line by line, to know the line with the error
            lines = iter(lambda: file.readline(MOST_BYTES + 1), b"")
            for number, data in enumerate(lines, start=1):
                if len(data) > MOST_BYTES:
                    raise bad_line(path, number, f"a line has {MOST_BYTES} bytes at most")
                if line := data.removeprefix(BOM).decode().strip():
                    yield number, line
    except OSError as error:
        raise BadRequest(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise bad_line(path, number, "no UTF-8 text") from None


def bad_line(path: Path, number: int, problem: object) -> BadRequest:
    """Return the error of a line."""
    return BadRequest(f"{path}:{number}: {problem}")

"""Files of request bodies."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from engine.protocol import BadRequest
from router.workload.files import bad_line, numbered_lines
from router.workload.request import LoadRequest

__all__ = ["bodies", "is_body"]


def bodies(path: Path, output: int) -> Iterator[LoadRequest]:
    """Read one request body per line, and start over at the end.

    A body has `prompt` or `messages`; `max_tokens` defaults to `output`. A bare string is a prompt.
    All lines are checked before the first request. Raises `BadRequest`, naming the line.
    """
    for _ in _read(path, output):
        pass
    return itertools.chain.from_iterable(_read(path, output) for _ in itertools.repeat(None))


def is_body(line: str) -> bool:
    """Return whether a line is meant as a request body."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(fields, str) or (
        isinstance(fields, dict) and ("prompt" in fields or "messages" in fields)
    )


def _read(path: Path, output: int) -> Iterator[LoadRequest]:
    number = 0
    for number, line in numbered_lines(path):
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise bad_line(path, number, error) from None
        body = {"prompt": fields} if isinstance(fields, str) else fields
        if not isinstance(body, dict) or ("prompt" in body) == ("messages" in body):
            raise bad_line(path, number, "want an object with prompt or messages")
        prompt = body.get("prompt")
        known = len(prompt) if isinstance(prompt, list) else None
        yield LoadRequest({"max_tokens": output, **body}, known)
    if not number:
        raise BadRequest(f"{path}: the file is empty")

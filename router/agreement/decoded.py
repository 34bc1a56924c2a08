"""What is in the store, which anybody may have written."""

from __future__ import annotations

from typing import TypeVar

import msgspec

__all__ = ["decoded"]

T = TypeVar("T")


def decoded(value: bytes, kind: type[T]) -> T | None:
    """Return a value of the store, `None` if it is no JSON of this kind."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None

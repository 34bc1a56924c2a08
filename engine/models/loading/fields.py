"""Typed access to JSON objects and GGUF metadata; a value of a wrong type raises CorruptModel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from engine.models.errors import CorruptModel

__all__ = ["Fields", "read_json"]


class Fields:
    """A mapping and its `origin`, which appears in error messages. A null value counts as absent.

    Each getter returns `default` if the key is absent.

    Raises: `CorruptModel` for an absent key without default, and for a value of a wrong type.
    """

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self.values = values
        self.origin = origin

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, value, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value, "a number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def strings(self, key: str, default: list[str] | None = None) -> list[str]:
        value = self._get(key, default)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, value, "a list of strings")
        return value

    def integers(self, key: str, default: list[int] | None = None) -> list[int]:
        value = self._get(key, default)
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self._wrong(key, value, "a list of integers")
        return value

    def numbers(self, key: str, default: list[float] | None = None) -> list[float]:
        value = self._get(key, default)
        if not isinstance(value, list) or not all(isinstance(i, int | float) for i in value):
            raise self._wrong(key, value, "a list of numbers")
        return [float(item) for item in value]

    def fields(self, key: str) -> Fields:
        """Return the object under `key`, or an empty one if it is absent."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return Fields(value, f"{self.origin}: {key}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise CorruptModel(f"{self.origin} lacks {key}")
        return default

    def _wrong(self, key: str, value: object, wanted: str) -> CorruptModel:
        return CorruptModel(f"{self.origin}: {key} should be {wanted}, not {str(value)[:80]!r}")


def read_json(path: Path) -> Fields:
    """Return the object in a JSON file. Raises: `CorruptModel` if the file has no object."""
    try:
        value = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise CorruptModel(f"{path} is not JSON: {error}") from error
    except OSError as error:
        raise CorruptModel(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CorruptModel(f"{path} does not contain a JSON object")
    return Fields(value, str(path))

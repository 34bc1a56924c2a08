"""The configuration in force as text or JSON: each key with its value and its source."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from router.cli.config.effective import Effective, Entry
from router.cli.config.schema import KEYS_FILE

__all__ = ["as_json", "as_lines"]

MASK = "***"


def as_lines(config: Effective, *, changed: bool) -> Iterator[str]:
    """Yield `KEY = VALUE  # SOURCE` for each key; with `changed`, without defaults."""
    rows = [
        (f"{key} = {_text(entry.value)}", entry.source)
        for key, entry in _rows(config)
        if entry.layer != "default" or not changed
    ]
    width = min(max((len(left) for left, _ in rows), default=0), 60)
    for left, source in rows:
        yield f"{left:<{width}}  # {source}"


def as_json(config: Effective, *, changed: bool) -> str:
    """Return one JSON object: of each key, its `value` and its `source`."""
    found = {
        key: {"value": _plain(entry.value), "source": entry.source}
        for key, entry in _rows(config)
        if entry.layer != "default" or not changed
    }
    return orjson.dumps(found, option=orjson.OPT_INDENT_2, default=str).decode()


def _rows(config: Effective) -> Iterator[tuple[str, Entry]]:
    yield from config.top.items()
    yield from ((f"router.{name}", entry) for name, entry in config.router.items())
    yield from ((f"router.params.{name}", entry) for name, entry in config.params.items())
    for name, entry in config.keys.items():
        secret = config.schema.keys[name].secret and entry.value
        value = MASK if secret else entry.value
        key = "file" if name == KEYS_FILE else name
        yield f"keys.{key}", Entry(value, entry.layer, entry.source)
    yield from ((f"engine.{name}", entry) for name, entry in config.engine.items())
    for number, pool in enumerate(config.pools):
        key = f"pool[{number}]"
        layer = pool.layer
        own = {"name": pool.name, "role": pool.role, "count": pool.count, "labels": pool.labels}
        for name, value in own.items():
            if value:
                yield f"{key}.{name}", Entry(value, layer, pool.source)
        for name, entry in pool.engine.items():
            if entry != config.engine[name]:
                yield f"{key}.engine.{name}", entry


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _text(value: Any) -> str:
    if value is None:
        return '""'
    return json.dumps(_plain(value), default=str, ensure_ascii=False)

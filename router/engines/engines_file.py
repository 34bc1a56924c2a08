"""The file of `--engines-file`: one engine per line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from engine.protocol import BadRequest
from router.engines.backend import ROLES, Role
from router.engines.openai import ServerAddress

__all__ = ["EngineEntry", "engine_url", "parse_engine", "parse_engines"]


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """One line: an engine's URL, role and labels."""

    url: str
    role: Role | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


def engine_url(url: str) -> str:
    """Return `url` without a trailing slash. Raises `BadRequest` if it is no engine's URL.

    That of a plain OpenAI server begins with `openai+http://` or `openai+https://`.
    """
    if ServerAddress.names(url):
        return ServerAddress.parse(url).url
    try:
        parts = urlsplit(url)
        plain = not (parts.username or parts.query or parts.fragment)
        good = plain and parts.scheme in ("http", "https") and bool(parts.hostname)
        good = good and (parts.port is None or parts.port >= 0)  # raises if it is out of range
    except ValueError:
        good = False
    if not good or not url.isprintable() or " " in url or "\\" in url:
        raise BadRequest(f"no URL of an engine: {url[:200]!r}", param="url")
    return url.rstrip("/")


def parse_engines(text: str) -> list[EngineEntry]:
    """Parse lines of the form `URL [role=prefill] [LABEL=VALUE]…`; `#` begins a comment.

    Raises `BadRequest`, naming the line, for any other form and for a repeated URL; also for a file
    without engines.
    """
    entries: dict[str, EngineEntry] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            entry = _entry(words)
            if entry.url in entries:
                raise BadRequest(f"{entry.url} comes twice")
        except BadRequest as error:
            raise BadRequest(f"line {number}: {error.message}") from None
        entries[entry.url] = entry
    if not entries:  # more likely a file that is just being written than an empty fleet
        raise BadRequest("there is no engine in it")
    return list(entries.values())


def parse_engine(text: str) -> EngineEntry:
    """Parse `URL [role=prefill] [LABEL=VALUE]…`, the value of `--engine`. Raises `BadRequest`."""
    return _entry(text.split() or [text])


def _entry(words: list[str]) -> EngineEntry:
    labels: dict[str, str] = {}
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise BadRequest(f"{word!r} is not of the form NAME=VALUE")
        labels[name] = value
    role = labels.pop("role", None)
    if role is not None and role not in ROLES:
        raise BadRequest(f"no role: {role!r}", param="role")
    return EngineEntry(engine_url(words[0]), role, labels)

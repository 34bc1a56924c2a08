"""`openai+http://HOST[:PORT][/PREFIX][?model=NAME&max_streams=N]`: the URL of an OpenAI server."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from engine.protocol import BadRequest

__all__ = ["ServerAddress"]

SCHEMES = {"openai+http": "http", "openai+https": "https"}
MOST_STREAMS = 1024  # generations at a time, each on a connection of its own
OPTIONS = ("model", "max_streams")
NAME = 256  # characters of a model's name


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A server's URL, taken apart. `base` is what precedes `/v1/completions` and `/health`."""

    url: str  # as given, without a trailing slash
    base: str
    model: str = ""  # of those that it serves; empty: the only one
    max_streams: int = MOST_STREAMS

    @staticmethod
    def names(url: str) -> bool:
        """Return whether the scheme is that of an OpenAI server."""
        return url.partition("://")[0].lower() in SCHEMES

    @classmethod
    def parse(cls, url: str) -> ServerAddress:
        """Take a URL apart. Raises `BadRequest`. `/v1` at the end may be given or left out."""
        try:
            parts = urlsplit(url)
            good = parts.scheme in SCHEMES and bool(parts.hostname)
            good = good and not (parts.username or parts.fragment)
            good = good and (parts.port is None or parts.port >= 0)  # raises if out of range
            options = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if (
                parts.query
            ) else []  # fmt: skip
        except ValueError:
            good, options = False, []
        if not good or not url.isprintable() or " " in url or "\\" in url:
            raise BadRequest(f"no URL of an OpenAI server: {url[:200]!r}", param="url")
        given = dict(options)
        if len(given) < len(options) or not given.keys() <= set(OPTIONS):
            raise BadRequest(
                f"the options of an OpenAI server's URL are {' and '.join(OPTIONS)}, "
                f"each once, not {parts.query[:200]!r}",
                param="url",
            )
        path = parts.path.rstrip("/").removesuffix("/v1")
        whole = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        return cls(
            url=f"{whole}?{parts.query}" if parts.query else whole,
            base=f"{SCHEMES[parts.scheme]}://{parts.netloc}{path}",
            model=_name(given.get("model", "")),
            max_streams=_count(given.get("max_streams", str(MOST_STREAMS))),
        )


def _name(text: str) -> str:
    if len(text) > NAME:
        raise BadRequest(f"model: a name of more than {NAME} characters", param="url")
    return text


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 7 and int(text)):
        raise BadRequest(f"max_streams is a number from 1 on, not {text[:20]!r}", param="url")
    return int(text)

"""The files of the page, read once: bytes, content type, ETag."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

__all__ = ["INDEX", "Asset", "assets"]

INDEX = "index.html"
# What browsers load. Licences lie beside the libraries and are not served.
MEDIA = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file. `etag` changes with its bytes, and stands in quotation marks."""

    body: bytes
    media: str
    etag: str


@cache
def assets() -> Mapping[str, Asset]:
    """Return the files by their paths below `static/`, such as `views/fleet.js`."""
    return dict(_files(resources.files("router.ui") / "static", ""))


def _files(folder: Traversable, prefix: str) -> Iterator[tuple[str, Asset]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry, f"{prefix}{entry.name}/")
        elif media := MEDIA.get(entry.name[entry.name.rfind(".") :]):
            body = entry.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            yield f"{prefix}{entry.name}", Asset(body, media, etag)

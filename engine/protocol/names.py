"""Page names: routers identify cached pages by them, without the pages' tokens.

A name is a hash of all tokens up to the page's end. Pages of equal names hold the same KV on any
engine, and a cache that holds a page holds all pages before it. A hash has 64 bits: a collision
costs a request some time but never gives it wrong tokens, because engines match tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from kvcache.types import PageName

__all__ = ["page_name", "page_names"]

TOKEN_BYTES = 4


def page_name(before: PageName, page: bytes) -> PageName:
    """Return the name of a page: 16 hexadecimal digits.

    `before` is the name of the page before it, "" for none. `page` holds its tokens as
    little-endian int32.
    """
    return PageName(blake2b(before.encode() + page, digest_size=8).hexdigest())


def page_names(tokens: Sequence[int], page_size: int) -> list[PageName]:
    """Return the names of the full pages of `tokens`. Takes half a microsecond per page."""
    step = page_size * TOKEN_BYTES
    data, name = array("i", tokens).tobytes(), PageName("")
    return [
        name := page_name(name, data[at : at + step]) for at in range(0, len(data) - step + 1, step)
    ]

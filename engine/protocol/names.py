"""The names of pages: how a router knows a page that an engine has cached, without its tokens.

A name says all tokens up to the page's end, so pages of equal names hold the same KV, wherever they
are; and who has a page has all before it. Names are of 64 bits: two prompts that share one by
chance cost a request some time, never its tokens, for engines match tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from kvcache.types import PageName

__all__ = ["page_name", "page_names"]

TOKEN_BYTES = 4


def page_name(before: PageName, page: bytes) -> PageName:
    """The name of a page: of the name of the page before it ("" for none), and of its own tokens,
    int32, little endian. 16 hexadecimal digits."""
    return PageName(blake2b(before.encode() + page, digest_size=8).hexdigest())


def page_names(tokens: Sequence[int], page_size: int) -> list[PageName]:
    """The names of the full pages of `tokens`; half a microsecond each."""
    step = page_size * TOKEN_BYTES
    data, name = array("i", tokens).tobytes(), PageName("")
    return [
        name := page_name(name, data[at : at + step]) for at in range(0, len(data) - step + 1, step)
    ]

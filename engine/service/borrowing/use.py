"""Where the sequences of a cache begin to use borrowed blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

from kvcache.cache import KVCache
from kvcache.lending import BlockSource
from kvcache.remote_attention import RemoteAttention

__all__ = ["use_borrowed"]

log = logging.getLogger(__name__)


def use_borrowed(cache: KVCache, source: BlockSource, remote: RemoteAttention) -> None:
    """Let the sequences of `cache` continue in blocks of `source`, attended to by `remote`."""
    borrow = getattr(cache, "borrow", None)
    if borrow is None:
        log.warning("sequences of this version do not use borrowed pages")
        return
    cast(Callable[[BlockSource, RemoteAttention], None], borrow)(source, remote)

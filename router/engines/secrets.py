"""Engines with different cluster secrets: each serves, but they cannot exchange KV."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from router.engines.backend import Backend

__all__ = ["compare_secrets"]

log = logging.getLogger(__name__)


def compare_secrets(backends: Iterable[Backend]) -> None:
    """Set the `warning` of each engine whose cluster secret differs from that of most engines.

    Engines that are down do not count. If no secret is the most frequent one, the first engine
    decides. A new warning is logged.
    """
    told = [b for b in backends if b.secret_digest is not None and b.status != "down"]
    counts = Counter(backend.secret_digest for backend in told)
    if not told:
        return
    common = counts.most_common(1)[0][0]  # ties: the one counted first
    example = next(backend for backend in told if backend.secret_digest == common)
    for backend in told:
        warning = ""
        if backend.secret_digest != common:
            warning = (
                f"its cluster secret is not that of engine {example.id}: it serves, but exchanges "
                "no KV with engines that have another MICROSERVE_SECRET"
            )
            if not backend.warning:
                log.warning("engine %s: %s", backend.id, warning)
        backend.warning = warning

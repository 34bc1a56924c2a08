"""The names of the pages that vLLM's prefix cache holds, as the notes from its process tell."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvcache.types import PageName

__all__ = ["CachedNames"]

Tell = Callable[[Sequence[PageName], Sequence[PageName]], None]


class CachedNames:
    """Implements `engine.service.prefix_feed.FollowedCache`. Lives on the lead's event loop."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._names: dict[PageName, None] = {}
        self._tell: Tell | None = None

    def __len__(self) -> int:
        return len(self._names)

    def follow_prefixes(
        self, name: Callable[[PageName, bytes], PageName], changed: Tell
    ) -> Sequence[PageName]:
        """Return all names, and report changes from now on. There is one follower."""
        with self.lock:
            self._tell = changed
            return list(self._names)

    def change(self, added: Sequence[PageName], removed: Sequence[PageName]) -> None:
        """Apply a change, and report what is new of it."""
        with self.lock:
            gone = [name for name in removed if self._names.pop(name, self) is None]
            new = [name for name in added if name not in self._names]
            self._names.update(dict.fromkeys(new))
            if self._tell is not None and (new or gone):
                self._tell(new, gone)

"""What several routers share: a versioned document, sources, a log, counters, limits, members.

`SharedStore` is the interface. It is kept in a process (`MemoryStore`), by a parent of worker
processes (`LinkedStore`, served by `StoreServer`), or by Redis. Imports `base`.
"""

from router.store.address import StoreAddress
from router.store.bucket import Bucket
from router.store.link import Link
from router.store.linked import CHANGED, LinkedStore
from router.store.memory import MemoryStore
from router.store.notices import Notices
from router.store.redis import RedisStore
from router.store.server import StoreServer
from router.store.store import (
    MOST_DOCUMENT,
    RESTORE_S,
    Change,
    Document,
    LogEntry,
    Outcome,
    SharedStore,
    Take,
    Taken,
)

__all__ = [
    "CHANGED",
    "MOST_DOCUMENT",
    "RESTORE_S",
    "Bucket",
    "Change",
    "Document",
    "Link",
    "LinkedStore",
    "LogEntry",
    "MemoryStore",
    "Notices",
    "Outcome",
    "RedisStore",
    "SharedStore",
    "StoreAddress",
    "StoreServer",
    "Take",
    "Taken",
]

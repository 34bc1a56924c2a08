"""Keeps user code from harming other requests: supervised tasks and the watchdog.

Imports `strategy` and the rooms below it.
"""

from router.supervision.child_tasks import ChildTasks, adopting
from router.supervision.interruption import Interrupted
from router.supervision.supervised import Supervised
from router.supervision.user_frames import is_user_record, line_in, waits_at
from router.supervision.user_threads import UserThreads
from router.supervision.violations import ViolationKind
from router.supervision.watchdog import Watchdog

__all__ = [
    "ChildTasks",
    "Interrupted",
    "Supervised",
    "UserThreads",
    "ViolationKind",
    "Watchdog",
    "adopting",
    "is_user_record",
    "line_in",
    "waits_at",
]

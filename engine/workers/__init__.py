"""An engine of many workers: processes that each compute a part of the model.

This room is the lead's side: it has the pages, starts the workers, replaces those that die, and
sends each step to all. May import `exchange`, but nothing of `part`, which is the workers' side.
"""

from engine.workers.exchange import WorkerSettings
from engine.workers.group import WorkerGroup
from engine.workers.runner import WorkersRunner
from engine.workers.store import WorkerStore

__all__ = ["WorkerGroup", "WorkerSettings", "WorkerStore", "WorkersRunner"]

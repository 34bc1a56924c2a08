"""An engine of many workers: processes that each compute a part of the model.

The lead process has the API, the scheduler and the bookkeeping. It sends each step to the workers
as plain arrays; they have the weights and the pages.
"""

from engine.workers.group import WorkerGroup
from engine.workers.runner import WorkersRunner
from engine.workers.settings import WorkerSettings
from engine.workers.store import WorkerStore

__all__ = ["WorkerGroup", "WorkerSettings", "WorkerStore", "WorkersRunner"]

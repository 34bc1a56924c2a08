"""Several router processes on one port (`--workers`): the parent, and what a worker runs.

The parent serves their store. Imports `server` and the rooms below it.
"""

from router.workers.parent import run_workers

__all__ = ["run_workers"]

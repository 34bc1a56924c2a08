"""What passes between a lead and its workers: settings, messages, steps, and sums.

May import nothing of the rooms beside it.
"""

from engine.workers.exchange.settings import WorkerSettings

__all__ = ["WorkerSettings"]

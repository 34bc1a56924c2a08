"""`microserve up`: engines and a router as child processes, restarted when they die.

May import `base`.
"""

from router.supervisor.child_process import ChildProcess
from router.supervisor.fleet import Fleet, FleetConfig
from router.supervisor.pools import Pool, as_arguments
from router.supervisor.restarts import Backoff, on_port, watch_health

__all__ = [
    "Backoff",
    "ChildProcess",
    "Fleet",
    "FleetConfig",
    "Pool",
    "as_arguments",
    "on_port",
    "watch_health",
]

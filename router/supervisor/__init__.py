"""`microserve up`: engines and a router as child processes, restarted when they die.

May import `base`.
"""

from router.supervisor.child_process import GRACE_S, ChildProcess
from router.supervisor.fleet import Fleet, FleetConfig, write_state
from router.supervisor.pools import Pool, as_arguments, named_engines, pool_arguments
from router.supervisor.restarts import Backoff, on_port, watch_health

__all__ = [
    "GRACE_S",
    "Backoff",
    "ChildProcess",
    "Fleet",
    "FleetConfig",
    "Pool",
    "as_arguments",
    "named_engines",
    "on_port",
    "pool_arguments",
    "watch_health",
    "write_state",
]

"""Requests and arrival times, from a seed or from a file: what loads a server, real or simulated.

Imports no other room of the router.
"""

from router.workload.arrivals import evenly, gamma, poisson
from router.workload.lengths import lognormal
from router.workload.request import LoadRequest, timed
from router.workload.workload import (
    ARRIVALS,
    WORKLOADS,
    Workload,
    WorkloadConfig,
    open_workload,
)

__all__ = [
    "ARRIVALS",
    "WORKLOADS",
    "LoadRequest",
    "Workload",
    "WorkloadConfig",
    "evenly",
    "gamma",
    "lognormal",
    "open_workload",
    "poisson",
    "timed",
]

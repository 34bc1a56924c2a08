"""Requests and arrival times, from a seed or from a file: what loads a server, real or simulated.

Imports no other room of the router.
"""

from router.workload.arrivals import evenly, poisson
from router.workload.workload import (
    WORKLOADS,
    LoadRequest,
    fixed,
    jsonl,
    long,
    mooncake,
    sharegpt,
)

__all__ = [
    "WORKLOADS",
    "LoadRequest",
    "evenly",
    "fixed",
    "jsonl",
    "long",
    "mooncake",
    "poisson",
    "sharegpt",
]

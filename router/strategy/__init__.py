"""What a strategy sees: requests, engines, clusters, leases and parameters.

Imports `legs` and the rooms below it.
"""

from router.strategy.cluster import Cluster
from router.strategy.definition import Bound, Strategy
from router.strategy.engine import Engine

__all__ = ["Bound", "Cluster", "Engine", "Strategy"]

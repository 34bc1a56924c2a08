"""A programmable async router: what a strategy file imports.

from router import Cluster, Request, strategy
"""

from router.cluster import Cluster, Pool
from router.engine import Engine
from router.lease import Lease
from router.replica import Mirror
from router.request import Chunk, Request
from router.strategy import Strategy, strategy

__all__ = [
    "Chunk",
    "Cluster",
    "Engine",
    "Lease",
    "Mirror",
    "Pool",
    "Request",
    "Strategy",
    "strategy",
]

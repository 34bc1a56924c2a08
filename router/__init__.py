"""A programmable async router: what a strategy file imports.

from router import Cluster, Request, strategy
"""

from router.base.request import Chunk, Request
from router.strategy.cluster import Cluster, Pool
from router.strategy.definition import Strategy, strategy
from router.strategy.engine import Engine, Lease, Mirror

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

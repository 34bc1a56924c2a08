"""`microserve up --on`: engines and routers as actors of a Ray cluster, which Ray places.

May import `base` and `supervisor`, and `ray` only inside functions: it is an extra.
"""

from router.ray_fleet.cluster import FleetGone
from router.ray_fleet.connection import NAMESPACE, connect
from router.ray_fleet.operator import Line, RayFleet
from router.ray_fleet.plan import Impossible, RayFleetSpec, check_name

__all__ = [
    "NAMESPACE",
    "FleetGone",
    "Impossible",
    "Line",
    "RayFleet",
    "RayFleetSpec",
    "check_name",
    "connect",
]

"""Discovery of engines: the ready pods behind Kubernetes services, from their EndpointSlices.

Imports `engines` and `base`. The official client (the extra `kubernetes`) is imported on use.
"""

from router.discovery.address import parse_services
from router.discovery.api import open_slices
from router.discovery.follower import Discovery

__all__ = ["Discovery", "open_slices", "parse_services"]

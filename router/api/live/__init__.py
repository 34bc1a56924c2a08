"""Snapshots of a router, one a second, computed while somebody listens and shared by listeners.

activity, queue ──► Part ──┐
other workers'  ──► Part ──┴─► snapshot ──► a frame per set of objectives ──► its listeners

May import what `router.api` may.
"""

from router.api.live.feed import LiveFeed
from router.api.live.part import Part, part_of

__all__ = ["LiveFeed", "Part", "part_of"]

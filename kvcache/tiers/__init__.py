"""Tiers: memory and files below the pool, for evicted prefixes and preempted sequences.

May import `memory` and the rooms below it.
"""

from kvcache.tiers.disk_store import DiskStore
from kvcache.tiers.store import DevicePages, HostStore, SplitPages, TierStore

__all__ = ["DevicePages", "DiskStore", "HostStore", "SplitPages", "TierStore"]

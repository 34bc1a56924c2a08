"""The memory of pages: its layout, regions that peers can write, write rights, prefaulting."""

from kvcache.memory.layout import KVLayout
from kvcache.memory.prefault import Prefaulter
from kvcache.memory.region import LocalRegion, Region, SharedRegion, Slots

__all__ = ["KVLayout", "LocalRegion", "Prefaulter", "Region", "SharedRegion", "Slots"]

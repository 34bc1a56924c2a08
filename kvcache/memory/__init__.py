"""The memory of pages: its layout, regions that peers can write, write rights, prefaulting."""

from kvcache.memory.block_layout import BlockLayout
from kvcache.memory.cuda import CudaDevice
from kvcache.memory.device import Copies, Device, Mapping
from kvcache.memory.device_region import DeviceRegion, DeviceSlots
from kvcache.memory.flagged_region import EXCLUSIVE, PARTIES, ROW, FlaggedRegion
from kvcache.memory.layout import KVLayout, PoolLayout, SplitLayout
from kvcache.memory.part_region import PartRegion
from kvcache.memory.prefault import USUAL_BYTES, Prefaulter
from kvcache.memory.processes import Process
from kvcache.memory.region import LocalRegion, Region, SharedRegion, Slots

__all__ = [
    "EXCLUSIVE",
    "PARTIES",
    "ROW",
    "USUAL_BYTES",
    "BlockLayout",
    "Copies",
    "CudaDevice",
    "Device",
    "DeviceRegion",
    "DeviceSlots",
    "FlaggedRegion",
    "KVLayout",
    "LocalRegion",
    "Mapping",
    "PartRegion",
    "PoolLayout",
    "Prefaulter",
    "Process",
    "Region",
    "SharedRegion",
    "Slots",
    "SplitLayout",
]

"""Sizing: the memory that an engine may use, and the pool that it chooses.

May import `engine.protocol`. Imports no torch.
"""

from engine.sizing.memory import Memory, read_memory
from engine.sizing.pool import PoolSize, choose_device_pool, choose_pool

__all__ = ["Memory", "PoolSize", "choose_device_pool", "choose_pool", "read_memory"]
